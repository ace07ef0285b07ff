"""The loop over fakes: end, metrics, checkpoints, resets of the reference."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Config, ReferenceReset
from alphaapollo.data.stream import PromptStream
from alphaapollo.evaluation.validation import ValidationResult
from alphaapollo.launch.session import BackgroundCheckpointWriter
from alphaapollo.observability.console import Console
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.trainer import loop
from alphaapollo.trainer.loop import should_reset_reference
from alphaapollo.trainer.progress import Progress, TrainingGoal
from alphaapollo.trainer.step.collect import CollectedGroups
from alphaapollo.trainer.step.curriculum import StreamSampler
from alphaapollo.trainer.step.learn import UpdateResult
from tests.unit.metric_names import undocumented
from tests.unit.trainer.samples import group, trajectory


class Role:
    def __init__(self, **figures: float) -> None:
        self.memory_metrics = figures

    async def sleep(self) -> None:
        pass

    async def save(self, folder: str) -> None:
        Path(folder).mkdir()

    async def offload(self) -> None: ...

    async def wait_for_save(self) -> float:
        return 1.0


class Weights:
    async def publish(self, version: int) -> dict[str, float]:
        return {"sync/probe_gap": 0.0}


class Profiler:
    async def start_step(self, step: int | None, timer: Any) -> None: ...


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append({"step": step, **metrics})

    def write(self, step: int, groups: Any) -> None:
        pass


class FakeCheckpoints:
    """A checkpoint is complete at the next iteration."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.whole: list[float] = []

    def mark_models_inconsistent(self) -> None: ...

    def mark_models_consistent(self, progress: Progress) -> None: ...

    async def save(self, progress: Progress) -> None:
        self.steps.append(progress.step)
        self.whole.append(1.5)

    def pop_metrics(self) -> dict[str, float]:
        return {"checkpoint/write_seconds": self.whole.pop()} if self.whole else {}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ten prompts, two passes in batches of 4; an iteration consumes two batches, as with dynamic sampling."""

    async def collect(run: Any, step: int, timer: Any) -> CollectedGroups:
        run.progress.prompts_consumed += 8
        groups = [group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 2))]
        return CollectedGroups(groups, groups, rounds=2)

    async def learn(run: Any, step: int, groups: Any, timer: Any) -> UpdateResult:
        return UpdateResult({"actor/entropy": 0.5}, 0.0, trained_tokens=100)

    monkeypatch.setattr(loop, "collect_groups", collect)
    writer = FakeCheckpoints()
    return SimpleNamespace(
        config=Config.model_validate({"trainer": {"save_freq": 2, "test_freq": -1}}),
        plan=SimpleNamespace(placement=SimpleNamespace(num_gpus=0)),
        workers=SimpleNamespace(
            policy=Role(rss_gib=2.0),
            critic=None,
            reward_model=Role(rss_gib=1.0),
            engines=Role(**{"memory/engine_gib": 3.0}),
        ),
        weights=Weights(),
        prompts=range(10),
        sampler=StreamSampler(PromptStream(10, seed=0, shuffle=True)),
        learn=learn,
        goal=TrainingGoal.from_schedule(None, epochs=2, num_prompts=10, batch_size=4),
        progress=Progress(),
        tracker=Log(),
        rollout_log=Log(),
        console=Console(),
        profiler=Profiler(),
        reward_model_scorer=None,
        checkpoint_writer=writer,
        metric_sources=[writer],
    )


def test_the_last_epoch_ends_the_run(run: Any) -> None:
    asyncio.run(loop.train(run))
    assert [line["step"] for line in run.tracker.lines] == [1, 2, 3]
    assert run.checkpoint_writer.steps == [2, 3]  # every second iteration, and the last


def test_a_resumed_run_ends_at_the_same_iteration(run: Any) -> None:
    run.progress = replace(run.progress, step=2, prompts_consumed=16)
    asyncio.run(loop.train(run))
    assert [line["step"] for line in run.tracker.lines] == [3] and run.checkpoint_writer.steps == [3]
    asyncio.run(loop.train(run))  # all done: nothing happens
    assert len(run.tracker.lines) == 1


def test_every_iteration_logs_progress_and_memory(run: Any) -> None:
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


def test_a_checkpoint_is_written_while_the_next_iteration_learns(run: Any, tmp_path: Path) -> None:
    """The third iteration does not change the second's checkpoint, and the end waits for the last one."""
    calls: list[str] = []

    async def main() -> None:
        allowed, learn = asyncio.Event(), run.learn

        async def learn_and_let(run: Any, step: int, groups: Any, timer: Any) -> UpdateResult:
            learned = await learn(run, step, groups, timer)
            calls.append(f"learn {step}")
            if step == 3:
                assert not writer.checkpoints.list_completed()
                allowed.set()
            return learned

        class Policy(Role):
            async def save(self, folder: str) -> None:
                calls.append("save")

            async def wait_for_save(self) -> float:
                await allowed.wait()
                calls.append("written")
                return 1.0

        run.learn = learn_and_let
        folder = CheckpointFolder(tmp_path, None)
        run.checkpoint_writer = writer = BackgroundCheckpointWriter(folder, {"policy": Policy()}, calls.append)
        async with writer.finish_on_exit():
            await loop.train(run)
        progress = [Progress.read(folder) for folder in writer.checkpoints.list_completed()]
        assert [(one.step, one.prompts_consumed) for one in progress] == [(2, 16), (3, 24)]

    asyncio.run(main())
    assert calls == ["learn 1", "learn 2", "save", "learn 3", "written", "save", "written"]


def test_the_best_checkpoint_by_a_validation_metric_is_kept(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter([0.5, 0.9, 0.7])

    async def validate(*_: Any, **__: Any) -> ValidationResult:
        accuracy = next(accuracies)
        return ValidationResult({"val/accuracy": accuracy}, accuracy, {})

    async def main() -> None:
        async with run.checkpoint_writer.finish_on_exit():
            await loop.train(run)

    monkeypatch.setattr(loop, "validate", validate)
    run.config = Config.model_validate({"trainer": {"save_freq": 1, "test_freq": 1, "keep_best": "val/accuracy"}})
    run.val_prompts = []
    folder = CheckpointFolder(tmp_path, 1, "val/accuracy")
    run.checkpoint_writer = BackgroundCheckpointWriter(folder, {"policy": Role()}, print)
    asyncio.run(main())
    assert [path.name for path in folder.list_completed()] == ["step_000002", "step_000003"]
    assert folder.find_best() == tmp_path / "step_000002"
    assert Progress.read(tmp_path / "step_000003").validation == {"val/accuracy": 0.7}


def test_the_reference_is_reset_on_schedule() -> None:
    progress = Progress()
    due = [should_reset_reference(ReferenceReset(every=2), progress, step, None) for step in (1, 2, 3, 4)]
    assert due == [False, True, False, True]
    assert progress.reference_resets == 2


def test_the_reference_is_reset_when_validation_stagnates() -> None:
    progress, config = Progress(), ReferenceReset(patience=2)
    accuracies = [0.5, 0.5, 0.6, 0.6, 0.55, None, 0.6, 0.6, 0.7]
    due = [
        should_reset_reference(config, progress, step, accuracy) for step, accuracy in enumerate(accuracies, start=1)
    ]
    # without gain: .5 | .6 (the second), .55 -> reset | .6, .6 -> reset | .7 gains
    assert due == [False, False, False, False, True, False, False, True, False]
    assert (progress.best_accuracy, progress.validations_without_gain, progress.reference_resets) == (0.7, 0, 2)


def test_the_reference_is_not_reset_by_default() -> None:
    progress = Progress()
    assert not any(should_reset_reference(ReferenceReset(), progress, step, 0.5) for step in range(1, 20))
