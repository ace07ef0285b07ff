"""Profiles of single iterations, with the real handles in one process."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from alphaapollo.config.schema import Config
from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.handles import CriticGroup, PolicyGroup
from alphaapollo.controller.ranks import LocalRanks
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.session.progress import check_steps_within_run
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.utils.heartbeat import HEARTBEAT


class Worker:
    """A training rank."""

    placement = SimpleNamespace(rank=0)

    def work(self) -> None:
        (torch.ones(300, 300) @ torch.ones(300, 300)).sum()


class PolicyWorker(Worker): ...


class CriticWorker(Worker): ...


class RolloutWorker(Worker): ...


def profiler(steps: list[int], folder: Path) -> tuple[StepProfiler, Any, Terminal]:
    terminal = Terminal(record=True, width=300, quiet=True)
    policy: LocalRanks[Any] = LocalRanks(PolicyWorker(), "policy")
    workers: Any = SimpleNamespace(
        policy=PolicyGroup(policy),
        critic=CriticGroup(LocalRanks(CriticWorker(), "critic")),
        engines=EngineGroup(LocalRanks(RolloutWorker(), "rollout"), 1),  # type: ignore[arg-type]
    )
    return StepProfiler(steps, workers, folder, Console(terminal)), policy, terminal


def test_configured_iterations_are_profiled(tmp_path: Path) -> None:
    own, policy, _ = profiler([2, 4], tmp_path)

    async def iterations() -> None:
        for step in (1, 2, 3, 4):
            timer = Timer()
            await own.start_step(step, timer)
            assert (HEARTBEAT._recorded is not None) == (step in (2, 4))
            with timer("generate"), HEARTBEAT.use_track("rollout 0", "episode"), HEARTBEAT.record_call("generate"):
                pass
            with timer("update"):
                await policy.call(lambda worker: worker.work())
            assert ("profile" in timer.seconds) == (step != 1)
        await own.start_step(None, Timer())

    asyncio.run(iterations())
    assert sorted(file.name for file in (tmp_path / "profiles").iterdir()) == [
        "step_000002.json.gz",
        "step_000004.json.gz",
    ]
    with gzip.open(tmp_path / "profiles" / "step_000004.json.gz") as file:
        events = json.load(file)["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(tracks.values()) == ["controller", "policy 0", "rollout 0"]
    spans = {(tracks[one["pid"]], one["name"]): one for one in events if one["ph"] in "Xb"}
    assert {("controller", "generate"), ("controller", "update"), ("rollout 0", "generate")} <= spans.keys()
    update, product = spans["controller", "update"], spans["policy 0", "aten::mm"]
    assert update["ts"] - 1e5 <= product["ts"] <= update["ts"] + update["dur"] + 1e5


@pytest.mark.parametrize("name", ["profile_steps", "record_steps"])
def test_steps_beyond_the_run_are_refused(name: str) -> None:
    check_steps_within_run(f"trainer.{name}", [1, 4], total_steps=4)
    with pytest.raises(ValueError, match=rf"trainer\.{name}=\[3, 5\]: iteration 5 .* 4 "):
        check_steps_within_run(f"trainer.{name}", [3, 5], total_steps=4)
    for bad in ([0], [-1], [1.5], "all"):
        with pytest.raises(ValidationError):
            Config.model_validate({"trainer": {name: bad}})
