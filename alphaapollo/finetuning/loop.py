"""The loop of every kind of fine-tuning: the stream's next examples -> a batch for each group of ranks -> one optimiser
step on all ranks -> metrics -> validation and a checkpoint where they are due."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from alphaapollo.config.schema import TuningConfig
from alphaapollo.controller.tuning_crew import TunedGroup
from alphaapollo.data.batch import TunedBatch
from alphaapollo.finetuning.prepare import Prepared
from alphaapollo.finetuning.progress import Progress
from alphaapollo.launch.background_checkpoint import BackgroundSave
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import Tracker
from alphaapollo.utils.schedule import due

C = TypeVar("C", bound=TuningConfig)
E = TypeVar("E")
B = TypeVar("B", bound=TunedBatch)


@dataclass
class TuningRun(Generic[C, E, B]):
    """All that one run holds. Its state is `progress` and what the workers hold."""

    prepared: Prepared[C, E, B]
    trainer: TunedGroup[B]
    progress: Progress
    saving: BackgroundSave[Progress]
    tracker: Tracker
    console: Console

    def deal(self, examples: Sequence[E]) -> list[B]:
        """A batch for each group of ranks."""
        return self.prepared.station.deal(self.prepared.config, examples, self.prepared.layout)


async def train(run: TuningRun[C, E, B]) -> None:
    """Make the steps that remain. On any error the last whole checkpoint stands."""
    prepared, progress, saving = run.prepared, run.progress, run.saving
    trainer, size = prepared.config.trainer, prepared.config.data.train_batch_size
    val = {source: run.deal(examples) for source, examples in prepared.val.items()}
    begin, tokens = time.perf_counter(), 0
    while progress.step < prepared.total_steps:
        step = progress.step + 1
        is_last = step == prepared.total_steps
        indices = prepared.stream.indices(progress.examples_consumed, size)
        batches = run.deal([prepared.train.examples[index] for index in indices])
        saving.moves()
        made = await run.trainer.step(batches, trainer.on_bad_step == "skip")
        tokens += sum(int(batch.rows.lengths.sum()) for batch in batches)
        metrics = named("train", prepared.station.figures(made.sums) | made.figures)
        if due(step, trainer.test_freq, is_last):
            metrics |= await validate(run, val) if val else {}
            metrics |= await prepared.station.validate(run, step)
        progress.step, progress.examples_consumed = step, progress.examples_consumed + size
        metrics |= await saving.figures()
        if is_last or step % trainer.log_freq == 0 or any(name.startswith("val/") for name in metrics):
            metrics["train/epoch"] = progress.examples_consumed / prepared.stream.num_prompts
            metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - begin)
            run.tracker.log(step, metrics)
            run.console.step(step, metrics)
        saving.stands(progress)
        if due(step, trainer.save_freq, is_last):
            await saving.save(progress)


async def validate(run: TuningRun[C, E, B], val: Mapping[str, Sequence[B]]) -> dict[str, float]:
    """The figures of all validation examples, and of each source where there are several."""
    figures = run.prepared.station.figures
    sums = {source: await run.trainer.evaluate(batches) for source, batches in val.items()}
    metrics = named("val", figures(added(list(sums.values()))))
    for source, own in sums.items() if len(sums) > 1 else ():
        metrics |= {f"{name}/{source}": value for name, value in named("val", figures(own)).items()}
    return metrics


def named(prefix: str, figures: Mapping[str, float]) -> dict[str, float]:
    """`{"loss": 1.0}` as `{"train/loss": 1.0}`."""
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several batches as those of one; of names that end in _max the largest. Not all have to be in each."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: (max if name.endswith("_max") else sum)(part[name] for part in parts if name in part) for name in names
    }
