"""Fine-tuning loop on a stub task: order of batches, metrics, checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.batching.batch import FinetuningStepResult
from alphaapollo.config.schema import SftConfig
from alphaapollo.data.examples import LoadedExamples
from alphaapollo.data.stream import PromptStream
from alphaapollo.finetuning.task import FinetuningProgress, FinetuningRun, train
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter
from alphaapollo.session.progress import TrainingGoal
from alphaapollo.session.training import TrainingSession
from tests.unit.metric_names import undocumented


class StubTask:
    """An example is a number; the loss of a batch is its mean."""

    def make_batches(self, examples: list[int], plan: Any) -> list[Any]:
        return [SimpleNamespace(rows=SimpleNamespace(lengths=SimpleNamespace(sum=lambda: 10)), examples=examples)]

    def compute_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["tokens"]}

    async def validate(self, run: Any, step: int) -> dict[str, float]:
        return {"val/accuracy": min(step, 6 - step) / 10} if run.plan.config.data.val_prompts else {}


class Trainer:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def step(self, batches: list[Any], skip_bad_step: bool) -> FinetuningStepResult:
        (batch,) = batches
        self.calls.append(batch.examples)
        sums = {"loss": float(sum(batch.examples)), "tokens": float(len(batch.examples))}
        return FinetuningStepResult(sums, {"lr": 0.5, "grad_norm": 1.0, "steps_skipped": 0.0})

    async def evaluate(self, batches: list[Any]) -> dict[str, float]:
        return (await self.step(batches, False)).metric_sums

    async def save(self, folder: str) -> None:
        self.calls.append(f"save {Path(folder).parent.name[-1]}")

    async def offload(self) -> None:
        pass

    async def wait_for_save(self) -> float:
        return 1.0


class Log:
    def __init__(self) -> None:
        self.lines: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: dict[str, float], failure_reason: str = "") -> None:
        assert undocumented(metrics) == []
        self.lines[step] = metrics

    show_step = log


def run(
    folder: Path,
    progress: FinetuningProgress,
    val: dict[str, list[int]],
    val_prompts: str = "",
    seconds_per_step: float = 1.0,
    **trainer: Any,
) -> tuple[Trainer, Log]:
    data = {"train_batch_size": 2, "val_prompts": val_prompts}
    config = SftConfig.model_validate({"data": data, "trainer": trainer})
    plan: Any = SimpleNamespace(
        task=StubTask(),
        config=config,
        train=LoadedExamples([10, 11, 12], [3], []),
        val=val,
        stream=PromptStream(3, 0, shuffle=False),
        goal=TrainingGoal.from_settings(config.trainer, num_prompts=8, batch_size=2),
    )
    worker, log = Trainer(), Log()
    settings = config.trainer
    checkpoints = CheckpointFolder(folder, settings.max_ckpt_to_keep, settings.keep_best)
    saving = BackgroundCheckpointWriter[FinetuningProgress](checkpoints, {"model": worker}, print)

    def clock() -> float:
        return seconds_per_step * sum(isinstance(call, list) for call in worker.calls)

    async def main() -> None:
        async with saving.finish_on_exit():
            session = TrainingSession(config, None, log, log, saving)  # type: ignore[arg-type]
            await train(FinetuningRun(plan, worker, progress, session, clock))  # type: ignore[arg-type]

    asyncio.run(main())
    return worker, log


def test_batches_follow_the_stream_and_checkpoints_are_saved_and_resumed(tmp_path: Path) -> None:
    worker, log = run(tmp_path, FinetuningProgress(), {}, save_freq=3, log_freq=2)
    assert worker.calls == [[10, 11], [12, 10], [11, 12], "save 3", [10, 11], "save 4"]
    assert [*log.lines] == [2, 4] and log.lines[2]["train/loss"] == 11.0
    assert log.lines[4]["train/epoch"] == 8 / 3
    for step, progress in ((3, FinetuningProgress(3, 6)), (4, FinetuningProgress(4, 8))):
        assert FinetuningProgress.read(tmp_path / f"step_00000{step}") == progress
    worker, _ = run(tmp_path / "resumed", FinetuningProgress(3, 6), {}, save_freq=-1)
    assert worker.calls == [[10, 11]]


@pytest.mark.parametrize(("seconds_per_step", "test_freq", "saved"), [(149, -1, "4"), (301, -1, "24"), (100, 3, "34")])
def test_by_default_checkpoints_are_written_by_time_with_keep_best_and_at_the_end(
    tmp_path: Path, seconds_per_step: float, test_freq: int, saved: str
) -> None:
    keys = {"test_freq": test_freq, "keep_best": "val/accuracy" if test_freq > 0 else None}
    worker, _ = run(tmp_path, FinetuningProgress(), {}, "prompts", seconds_per_step, **keys)
    assert [call for call in worker.calls if call[:4] == "save"] == [f"save {step}" for step in saved]


def test_validation_covers_all_examples_and_each_source(tmp_path: Path) -> None:
    """(1 + 2 + 6) / 3 = 3, of the sources 1.5 and 6; logged where it was, whatever log_freq says."""
    _, log = run(tmp_path, FinetuningProgress(), {"maths": [1, 2], "code": [6]}, test_freq=3, log_freq=100)
    assert [*log.lines] == [3, 4]
    found = {name: value for name, value in log.lines[3].items() if name.startswith("val/")}
    assert found == {"val/loss": 3.0, "val/loss/maths": 1.5, "val/loss/code": 6.0}
    _, log = run(tmp_path, FinetuningProgress(), {"maths": [1, 2]}, test_freq=4)
    assert {name for name in log.lines[4] if name.startswith("val/")} == {"val/loss"}


def test_validation_of_the_task_runs_with_that_of_the_examples(tmp_path: Path) -> None:
    _, log = run(tmp_path, FinetuningProgress(), {}, "prompts", test_freq=3, log_freq=2)
    assert {step: line.get("val/accuracy") for step, line in log.lines.items()} == {2: None, 3: 0.3, 4: 0.2}


def test_fine_tuning_stops_early_and_a_resumed_run_at_the_same_step(tmp_path: Path) -> None:
    """val/loss is always 3: steps 2, 3 and 4 do not improve it, and the run would have 6."""
    keys = {"total_training_steps": 6, "test_freq": 1, "early_stopping_metric": "val/loss", "save_freq": 1}
    progress = FinetuningProgress()
    worker, _ = run(tmp_path, progress, {"maths": [1, 5]}, **keys)
    assert (progress.step, progress.best_value, worker.calls[-1]) == (4, 3.0, "save 4")
    resumed = FinetuningProgress.read(tmp_path / "step_000003")
    run(tmp_path / "resumed", resumed, {"maths": [1, 5]}, **keys)
    assert resumed == progress
    worker, _ = run(tmp_path / "part", FinetuningProgress(), {}, total_training_steps=6, stop_at_step=2)
    assert worker.calls[-1] == "save 2"


def test_the_best_checkpoint_by_a_validation_metric_is_kept(tmp_path: Path) -> None:
    keys = {"save_freq": 1, "test_freq": 1, "max_ckpt_to_keep": 1}
    run(tmp_path, FinetuningProgress(), {}, "prompts", keep_best="val/accuracy", **keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000004"]
    with pytest.raises(ValueError, match=r"keep_best=val/loss .* of val/accuracy"):
        run(tmp_path, FinetuningProgress(), {}, "prompts", keep_best="val/loss", **keys)
