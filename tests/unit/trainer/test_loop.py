"""The loop over fakes: end, metrics, checkpoints, resets of the reference."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Config, ReferenceReset, Trainer
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter
from alphaapollo.session.progress import Feedback, Progress, TrainingGoal
from alphaapollo.session.validation import ValidationResult
from alphaapollo.trainer import loop
from alphaapollo.trainer.loop import should_reset_reference
from alphaapollo.trainer.step.collect import CollectedGroups
from alphaapollo.trainer.step.update_result import UpdateResult
from tests.unit.metric_names import undocumented
from tests.unit.trainer.fakes import Checkpoints, do_nothing, make_run_state
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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ten prompts, two passes in batches of 4; an iteration consumes two batches, as with dynamic sampling."""

    async def collect(run: Any, step: int, timer: Any) -> CollectedGroups:
        run.progress.prompts_consumed += 8
        groups = [group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 2))]
        return CollectedGroups(groups, groups, rounds=2)

    async def learn(run: Any, step: int, groups: Any, timer: Any) -> UpdateResult:
        return UpdateResult({"actor/entropy": 0.5}, Feedback(), trained_tokens=100)

    async def publish(version: int) -> dict[str, float]:
        return {"sync/probe_gap": 0.0}

    async def measure_nothing(*_: Any) -> dict[str, float]:
        return {}

    monkeypatch.setattr(loop, "collect_groups", collect)
    monkeypatch.setattr(loop, "measure_sampling", measure_nothing)
    writer = Checkpoints()
    workers = SimpleNamespace(
        policy=Role(rss_gib=2.0),
        critic=None,
        reward_model=Role(rss_gib=1.0),
        engines=Role(**{"memory/engine_gib": 3.0}),
    )
    return make_run_state(
        Config.model_validate({"trainer": {"save_freq": 2, "test_freq": -1}}),
        range(10),
        workers,
        weights=SimpleNamespace(publish=publish, hand_over=do_nothing),
        learn=learn,
        goal=TrainingGoal.from_settings(Trainer(total_epochs=2), num_prompts=10, batch_size=4),
        checkpoint_writer=writer,
        metric_sources=[writer],
    )


def test_the_last_epoch_ends_the_run(run: Any) -> None:
    asyncio.run(loop.train(run))
    assert [line["step"] for line in run.session.tracker.lines] == [1, 2, 3]
    assert [*run.session.checkpoint_writer.saved] == [2, 3]  # every second iteration, and the last


def test_a_resumed_run_ends_at_the_same_iteration(run: Any) -> None:
    run.progress = replace(run.progress, step=2, prompts_consumed=16)
    for _ in range(2):  # the second time, all is done
        asyncio.run(loop.train(run))
        assert [line["step"] for line in run.session.tracker.lines] == [3] and [
            *run.session.checkpoint_writer.saved
        ] == [3]


def test_every_iteration_logs_progress_and_memory(run: Any) -> None:
    asyncio.run(loop.train(run))
    first = run.session.tracker.lines[0]
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
    assert all("memory/policy_rss_gib" in line for line in run.session.tracker.lines)
    assert undocumented(name for line in run.session.tracker.lines for name in line) == []


def test_the_best_checkpoint_by_a_validation_metric_is_kept(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter([0.5, 0.9, 0.7])

    async def validate(*_: Any, **__: Any) -> ValidationResult:
        accuracy = next(accuracies)
        return ValidationResult({"val/accuracy": accuracy}, accuracy, {})

    async def main() -> None:
        async with run.session.checkpoint_writer.finish_on_exit():
            await loop.train(run)

    monkeypatch.setattr(loop, "validate", validate)
    run.config = Config.model_validate({"trainer": {"save_freq": 1, "test_freq": 1, "keep_best": "val/accuracy"}})
    run.val_prompts = []
    folder = CheckpointFolder(tmp_path, 1, "val/accuracy")
    run.session.checkpoint_writer = BackgroundCheckpointWriter(folder, {"policy": Role()}, print)
    asyncio.run(main())
    assert [path.name for path in folder.list_completed()] == ["step_000002", "step_000003"]
    assert folder.find_best() == tmp_path / "step_000002"
    assert Progress.read(tmp_path / "step_000003").validation == {"val/accuracy": 0.7}


@pytest.mark.parametrize(
    ("settings", "accuracies", "due", "resets"),
    [
        ({}, [0.5] * 9, [], 0),
        ({"every": 2}, [None] * 4, [2, 4], 2),
        # without gain: .5 | .6 (the second), .55 -> reset | .6, .6 -> reset | .7 gains
        ({"patience": 2}, [0.5, 0.5, 0.6, 0.6, 0.55, None, 0.6, 0.6, 0.7], [5, 8], 2),
    ],
)
def test_the_reference_is_reset_on_schedule_or_when_validation_stagnates(
    settings: dict[str, int], accuracies: list[float | None], due: list[int], resets: int
) -> None:
    progress, config = Progress(), ReferenceReset(**settings)
    steps = enumerate(accuracies, start=1)
    assert [step for step, accuracy in steps if should_reset_reference(config, progress, step, accuracy)] == due
    assert progress.reference_resets == resets
    if "patience" in settings:
        assert (progress.best_accuracy, progress.validations_without_gain) == (0.7, 0)
