"""Engine that serves LoRA adapters, with a recorder instead of vLLM."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.engines.vllm.engine import VllmEngine
from alphaapollo.engines.vllm.settings import LORA_RANKS
from alphaapollo.weight_sync.transport import TransportKind

pytest.importorskip("vllm")


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_num_unfinished_requests(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> bool:
            self.calls.append((name, *arguments, *named.values()))
            return True

        return call


def calls_of(transport: TransportKind, *methods: str, **rollout: Any) -> list[tuple[Any, ...]]:
    spec = EngineSpec(0, "org/model", False, Rollout(**rollout), "cuda", "bfloat16", 64, "log", transport, lora_rank=8)
    engine, recorder = VllmEngine(spec), Recorder()

    async def all_of_them() -> None:
        engine._engine = recorder  # type: ignore[assignment]
        engine._core_death = asyncio.get_running_loop().create_future()
        for number, method in enumerate(methods, start=1):
            arguments = [f"/shm/v{number}"] if method == "receive_weights" else []
            await getattr(engine, method)(*arguments)

    asyncio.run(all_of_them())
    return recorder.calls


def test_base_weights_are_kept_in_host_memory_while_asleep() -> None:
    assert calls_of("adapter", "sleep", "wake_weights")[0] == ("sleep", 1, "keep")
    assert calls_of("ipc", "sleep", "wake_weights")[0] == ("sleep", 2, "keep")


def test_new_adapter_replaces_the_last_one() -> None:
    calls = calls_of("adapter", "receive_weights", "receive_weights")
    assert [call[0] for call in calls] == ["add_lora", "remove_lora", "add_lora"]
    first, (_, removed), second = calls[0][1], calls[1], calls[2][1]
    assert (first.lora_int_id, first.lora_path) == (1, "/shm/v1") and removed == 1
    assert (second.lora_int_id, second.lora_path) == (2, "/shm/v2") and second.lora_name != first.lora_name


def test_adapter_rank_is_rounded_up_to_one_vllm_supports() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS
    assert LORA_RANKS[-1] == 512  # the largest rank that the schema accepts with an engine
