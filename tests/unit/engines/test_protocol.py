"""The base class of engines checks the order of calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, get_args

import pytest

from alphaapollo.engines.protocol import Engine, MemoryPart
from alphaapollo.engines.types import EngineError
from alphaapollo.engines.weight_sync.transport import TransferMethod, WeightReceipt
from alphaapollo.types import Adapter
from tests.unit.engines.specs import make_spec


class RecordingEngine(Engine):
    """Engine that records the calls of its methods."""

    def __init__(self, transport: str = "ipc", colocate: bool = True):
        super().__init__(make_spec("cuda", transport=transport, colocate=colocate))
        self.calls: list[str] = []
        self.is_running = False

    def has_running_requests(self) -> bool:
        return self.is_running

    async def hold_requests(self) -> None:
        self.calls.append("hold")

    async def continue_requests(self) -> None:
        self.calls.append("continue")

    async def load_folder(self, folder: str) -> None:
        self.calls.append(f"folder {folder}")

    async def use_adapter(self, adapter: Adapter) -> None:
        self.calls.append(f"adapter {adapter.folder} {adapter.version}")

    async def begin_loading(self) -> None:
        self.calls.append("begin")

    async def load_bucket(self, update_info: Any) -> None:
        self.calls.append("bucket")

    async def end_loading(self) -> None:
        self.calls.append("end")

    async def apply_weights(self, version: int) -> WeightReceipt:
        self.calls.append(f"apply {version}")
        return WeightReceipt(version, "digest")

    async def free_memory(self, parts: frozenset[MemoryPart]) -> None:
        self.calls.append(f"free {' '.join(sorted(parts))}")

    async def allocate_memory(self, part: MemoryPart) -> None:
        self.calls.append(f"allocate {part}")


SYNC = ["start_weight_update", "update_weights {}", "update_weights {}", "finish_weight_update", "confirm_weights 1"]
LOADED = ["begin", "bucket", "bucket", "end", "apply 1"]
FREED = ["free kv_cache weights", "allocate weights", *LOADED, "allocate kv_cache"]


def run(engine: RecordingEngine, calls: list[str]) -> list[str]:
    """Call methods, `NAME ARGUMENT ...`. Returns what they called."""

    async def run_all() -> None:
        for call in calls:
            name, *arguments = call.split()
            method: Callable[..., Any] = getattr(engine, name)
            await method(*(int(one) if one.isdigit() else one for one in arguments))

    asyncio.run(run_all())
    return engine.calls


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (["pause", "pause", "resume", "resume"], ["hold", "continue"]),
        (["sleep", "sleep", "wake_weights", *SYNC, "wake_cache", "wake_cache"], FREED),
        (["release_cache", "release_cache", "wake_cache"], ["free kv_cache", "allocate kv_cache"]),
        (["release_cache", "sleep", "release_cache"], ["free kv_cache", "free weights"]),
        (["receive_weights v1 1", "confirm_weights 1"], ["begin", "folder v1", "end", "apply 1"]),
    ],
)
def test_calls_in_order(calls: list[str], expected: list[str]) -> None:
    assert run(RecordingEngine(), calls) == expected


def test_engines_with_their_own_gpus_do_not_sleep() -> None:
    assert run(RecordingEngine(colocate=False), ["sleep", "release_cache", "wake_weights", "wake_cache"]) == []


@pytest.mark.parametrize(
    ("calls", "fix"),
    [
        (["sleep", "wake_cache"], "wake_weights"),
        (["sleep", "start_weight_update"], "wake_weights"),
        (["sleep", "receive_weights v1 1"], "wake_weights"),
        (["update_weights {}"], "start_weight_update"),
        (["start_weight_update", "confirm_weights 1"], "finish_weight_update"),
    ],
)
def test_wrong_order(calls: list[str], fix: str) -> None:
    engine = RecordingEngine()
    with pytest.raises(EngineError, match=rf"rollout engine 0 .*Call {fix}\(\) first"):
        run(engine, calls)
    assert not {"allocate kv_cache", "bucket", "apply 1"} & {*engine.calls}


def test_weights_do_not_change_under_running_requests() -> None:
    engine = RecordingEngine()
    engine.is_running = True
    for call in ("start_weight_update", "receive_weights v1 1", "confirm_weights 1"):
        with pytest.raises(EngineError, match=r"Call pause\(\) first"):
            run(engine, [call])
    assert run(engine, ["pause", *SYNC]) == ["hold", *LOADED]
    serving = RecordingEngine("adapter")
    serving.is_running = serving.is_paused = True
    with pytest.raises(EngineError, match="adapter"):
        run(serving, ["receive_weights v1 1"])
    serving.is_running = False
    assert run(serving, ["receive_weights v1 1"]) == ["adapter v1 1"]


@pytest.mark.parametrize("colocate", [False, True])
def test_adapters_arrive_while_requests_run_if_the_engine_keeps_them(colocate: bool) -> None:
    """Requests are not paused, unless the engine frees its memory for the trainer."""
    engine = RecordingEngine("adapter", colocate)
    engine.keeps_adapters = engine.is_running = True
    assert engine.updates_in_flight == (not colocate)
    assert not RecordingEngine("adapter", colocate).updates_in_flight
    if colocate:
        with pytest.raises(EngineError, match=r"Call pause\(\) first"):
            run(engine, ["receive_weights v1 1", "confirm_weights 1"])
        run(engine, ["pause"])
    run(engine, ["receive_weights v1 1", "confirm_weights 1"])
    assert engine.calls[-2:] == ["adapter v1 1", "apply 1"] and engine.calls.count("hold") == colocate


def test_the_protocol_has_the_methods_of_a_weight_transfer() -> None:
    assert [name for name in get_args(TransferMethod) if not inspect.getdoc(getattr(Engine, name))] == []


def test_freed_weights_sample_nothing() -> None:
    engine = RecordingEngine()
    run(engine, ["sleep", "wake_weights"])
    with pytest.raises(EngineError, match="Send weights first"):
        engine.check_has_weights()
    run(engine, ["pause"])
    engine.check_has_weights()  # the request waits for resume
    run(engine, ["resume", *SYNC])
    engine.check_has_weights()
