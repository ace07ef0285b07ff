"""The loop over fakes: when it ends, and what it says of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.data.stream import PromptStream
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.observability.console import Console
from alphaapollo.trainer import loop
from alphaapollo.trainer.progress import Goal, Progress
from alphaapollo.trainer.saving import Saving
from alphaapollo.trainer.step.collect import Collected
from alphaapollo.trainer.step.learn import Learned
from tests.unit.metric_names import undocumented
from tests.unit.trainer.samples import group, trajectory


class Role:
    def __init__(self, **figures: float) -> None:
        self.figures = figures

    async def memory(self) -> dict[str, float]:
        return self.figures

    async def sleep(self) -> None:
        pass


class Weights:
    async def publish(self, version: int) -> dict[str, float]:
        return {"sync/probe_gap": 0.0}


class Profiler:
    async def turn_to(self, step: int | None, timer: Any) -> None: ...


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append({"step": step, **metrics})

    def write(self, step: int, groups: Any) -> None:
        pass


class Saves:
    """What is begun is whole by the next iteration."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.whole: list[float] = []

    def moves(self) -> None: ...

    def stands(self, progress: Progress) -> None: ...

    async def save(self, progress: Progress) -> None:
        self.steps.append(progress.step)
        self.whole.append(1.5)

    async def figures(self) -> dict[str, float]:
        return {"checkpoint/write_seconds": self.whole.pop()} if self.whole else {}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ten prompts, two passes in batches of 4; an iteration consumes two batches, as with dynamic sampling."""

    async def collect(run: Any, step: int, timer: Any) -> Collected:
        run.progress.prompts_consumed += 8
        groups = [group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 2))]
        return Collected(groups, groups, rounds=2)

    async def learn(run: Any, step: int, groups: Any, timer: Any) -> Learned:
        return Learned({"actor/entropy": 0.5}, 0.0, tokens=100)

    for name, fake in (("collect", collect), ("learn_recorded", learn)):
        monkeypatch.setattr(loop, name, fake)
    return SimpleNamespace(
        config=Config.model_validate({"trainer": {"save_freq": 2, "test_freq": -1}}),
        plan=SimpleNamespace(placement=SimpleNamespace(num_gpus=0)),
        crew=SimpleNamespace(
            policy=Role(rss_gib=2.0),
            critic=None,
            reward_model=Role(rss_gib=1.0),
            engines=Role(**{"memory/engine_gib": 3.0}),
        ),
        weights=Weights(),
        stream=PromptStream(10, seed=0, shuffle=True),
        goal=Goal.of(None, epochs=2, num_prompts=10, batch_size=4),
        progress=Progress(),
        tracker=Log(),
        rollout_log=Log(),
        console=Console(),
        profiler=Profiler(),
        trained_reward=None,
        reference=None,
        saving=Saves(),
    )


def test_the_iteration_that_consumes_the_last_pass_is_the_last(run: Any) -> None:
    asyncio.run(loop.train(run))
    assert [line["step"] for line in run.tracker.lines] == [1, 2, 3]
    assert run.saving.steps == [2, 3]  # every second iteration, and the last


def test_a_resumed_run_ends_at_the_same_iteration(run: Any) -> None:
    run.progress = replace(run.progress, step=2, prompts_consumed=16)
    asyncio.run(loop.train(run))
    assert [line["step"] for line in run.tracker.lines] == [3] and run.saving.steps == [3]
    asyncio.run(loop.train(run))  # all done: nothing happens
    assert len(run.tracker.lines) == 1


def test_every_iteration_says_where_the_run_stands_and_what_it_holds(run: Any) -> None:
    asyncio.run(loop.train(run))
    first = run.tracker.lines[0]
    expected = {
        "data/epoch": 0.8,
        "data/prompts_consumed": 8.0,
        "rollout/rounds": 2.0,
        "memory/policy_rss_gib": 2.0,
        "memory/reward_model_rss_gib": 1.0,
        "memory/engine_gib": 3.0,
        "reference/resets": 0.0,
    }
    assert {name: first[name] for name in expected} == expected
    assert all("memory/policy_rss_gib" in line for line in run.tracker.lines)
    assert undocumented(name for line in run.tracker.lines for name in line) == []


def test_a_checkpoint_is_written_while_the_next_iteration_learns(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the third iteration brings does not reach the second's checkpoint, and the end waits for the last one."""
    calls: list[str] = []

    async def main() -> None:
        allowed, learn = asyncio.Event(), loop.learn_recorded

        async def learn_and_let(run: Any, step: int, groups: Any, timer: Any) -> Learned:
            learned = await learn(run, step, groups, timer)
            calls.append(f"learn {step}")
            if step == 3:
                assert not saving.checkpoints.whole()
                allowed.set()
            return learned

        class Policy(Role):
            async def save(self, folder: str) -> None:
                calls.append("save")

            async def rest(self) -> None: ...

            async def written(self) -> float:
                await allowed.wait()
                calls.append("written")
                return 1.0

        @asynccontextmanager
        async def cache_released() -> AsyncIterator[None]:
            yield

        run.crew.policy, run.crew.engines.cache_released = Policy(), cache_released
        monkeypatch.setattr(loop, "learn_recorded", learn_and_let)
        run.saving = saving = Saving(CheckpointFolder(tmp_path, None), run.crew, calls.append)
        async with saving.settled():
            await loop.train(run)
        progress = [Progress.read(folder) for folder in saving.checkpoints.whole()]
        assert [(one.step, one.prompts_consumed) for one in progress] == [(2, 16), (3, 24)]

    asyncio.run(main())
    assert calls == ["learn 1", "learn 2", "save", "learn 3", "written", "save", "written"]
