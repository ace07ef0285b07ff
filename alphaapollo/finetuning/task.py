"""Interfaces of fine-tuning (task, plan and state of a run), and its loop, which all tasks share.

files --load_examples--> examples --make_batches--> one batch per data-parallel rank --worker_class-->
sums over all ranks --compute_metrics--> metrics
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.schema import Fsdp, Model, TuningConfig
from alphaapollo.controller.placement import Placement
from alphaapollo.data.examples import LoadedExamples
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.stream import PromptStream, WeightedFileStream
from alphaapollo.planning.memory_plan import MemoryRequest
from alphaapollo.runs.checkpoint_folder import RunProgress
from alphaapollo.runs.training_examples import LoggedExample
from alphaapollo.session.progress import TrainingGoal
from alphaapollo.session.training import TrainingSession
from alphaapollo.utils.frequency import is_checkpoint_due, is_due
from alphaapollo.workers.finetuning_worker import FinetuningWorker

if TYPE_CHECKING:
    from alphaapollo.controller.handles import FinetuningGroup


class FinetuningTask(ABC):
    """Base class of a kind of fine-tuning. A subclass defines its examples, batches, worker class and metrics."""

    worker_class: type[FinetuningWorker[Any]]

    def __init__(self, config: Any):
        self.config = config

    def check_config_and_get_notices(self, num_gpus: int) -> list[str]:
        """Check the configuration and the task's own inputs. Returns notices. Raises ValueError if a check fails."""
        return check_config_and_get_notices(self.config, num_gpus)

    @abstractmethod
    def load_examples(self, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> LoadedExamples[Any]:
        """Load the examples of the data files, at most max_samples if positive. Raises ValueError for invalid rows."""

    @abstractmethod
    def make_memory_request(self, examples: Sequence[Any]) -> MemoryRequest:
        """Return the inputs of the memory estimate for training on these examples, e.g. the longest length."""

    @abstractmethod
    def make_batches(self, examples: Sequence[Any], plan: FinetuningPlan) -> list[Any]:
        """Build the batches of one optimizer step, one per data-parallel rank."""

    @abstractmethod
    def describe_example(self, example: Any, decode: Callable[[Sequence[int]], str]) -> LoggedExample:
        """Describe an example for examples.jsonl. decode: returns the text of tokens, with special tokens."""

    @abstractmethod
    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute metrics, e.g. `loss`, from the sums that the workers returned for a batch, added over all ranks."""

    async def begin_run(self, run: FinetuningRun, stack: AsyncExitStack) -> None:
        """Prepare training, e.g. compute reference log-probs. The workers still have the initial weights.
        stack: closes at the end of the run what this method starts."""
        return

    async def validate(self, run: FinetuningRun, step: int) -> dict[str, float]:
        """Return validation metrics in addition to those of data.val_files, e.g. the accuracy of sampled answers."""
        return {}


@dataclass
class FinetuningProgress(RunProgress):
    """Progress of a fine-tuning run after `step` optimizer steps, saved in each checkpoint."""

    examples_consumed: int = 0  # position in the stream of examples
    validation: dict[str, float] = field(default_factory=dict)  # validation metrics of the step; empty: none


@dataclass(frozen=True)
class FinetuningPlan:
    """Checked configuration and loaded data of a fine-tuning run."""

    task: FinetuningTask
    config: TuningConfig
    model: Model  # model section, with dtype and attention resolved
    fsdp: Fsdp  # section fsdp_config, with the ranks that share a copy of the model resolved
    decode: Callable[[Sequence[int]], str]  # returns the text of tokens, with special tokens
    placement: Placement
    max_tokens: int  # token budget of a micro-batch, over the ranks that share its rows
    train: LoadedExamples[Any]
    val: dict[str, list[Any]]  # validation examples by source
    stream: PromptStream | WeightedFileStream
    goal: TrainingGoal

    @property
    def padded(self) -> bool:
        """Whether micro-batches are padded to their longest row."""
        return self.model.attention == "padded"


@dataclass
class FinetuningRun:
    """State of a fine-tuning run while it trains. A checkpoint saves `progress` and the state of the workers."""

    plan: FinetuningPlan
    trainer: FinetuningGroup[Any]
    progress: FinetuningProgress
    session: TrainingSession
    clock: Callable[[], float] = time.perf_counter  # seconds


async def train(run: FinetuningRun) -> None:
    """Run the remaining optimizer steps of a run. If this raises, the last complete checkpoint remains valid."""
    plan, progress, session, task = run.plan, run.progress, run.session, run.plan.task
    trainer, batch_size, writer = plan.config.trainer, plan.config.data.train_batch_size, session.checkpoint_writer
    val_batches = {source: task.make_batches(examples, plan) for source, examples in plan.val.items()}
    started, tokens = run.clock(), 0
    last_save = started
    while not plan.goal.is_last_step(progress, progress.step):
        step = progress.step + 1
        is_last = plan.goal.is_last_step(progress, step)
        indices = plan.stream.prompt_indices(progress.examples_consumed, batch_size)
        batches = task.make_batches([plan.train.examples[index] for index in indices], plan)
        writer.mark_models_inconsistent()
        step_result = await run.trainer.step(batches, trainer.on_bad_step == "skip")
        tokens += sum(int(batch.rows.lengths.sum()) for batch in batches)
        metrics = add_prefix("train", task.compute_metrics(step_result.metric_sums) | step_result.metrics)
        progress.validation = {}
        if is_due(step, trainer.test_freq, is_last):
            progress.validation = await validate(run, val_batches) if val_batches else {}
            progress.validation |= await task.validate(run, step)
            writer.checkpoints.check_keep_best_metric(progress.validation)
            metrics |= progress.validation
            plan.goal.early_stopping.observe(progress, progress.validation)
            is_last = plan.goal.is_last_step(progress, step)
        progress.step, progress.examples_consumed = step, progress.examples_consumed + batch_size
        metrics |= writer.pop_metrics()
        if is_last or step % trainer.log_freq == 0 or any(name.startswith("val/") for name in metrics):
            metrics["train/epoch"] = progress.examples_consumed / plan.stream.num_prompts
            metrics["train/tokens_per_second"] = tokens / (run.clock() - started)
            session.log(step, metrics)
        writer.mark_models_consistent(progress)
        has_score = bool(trainer.keep_best and progress.validation)
        if is_checkpoint_due(step, trainer.save_freq, is_last, has_score, run.clock() - last_save):
            await session.save(progress)
            last_save = run.clock()


async def validate(run: FinetuningRun, val_batches: Mapping[str, Sequence[object]]) -> dict[str, float]:
    """Compute metrics of all validation examples and, if there are several files, of each file."""
    compute = run.plan.task.compute_metrics
    sums = {source: await run.trainer.evaluate(batches) for source, batches in val_batches.items()}
    total = dict.fromkeys((name for source_sums in sums.values() for name in source_sums), 0.0)
    for source_sums in sums.values():
        total |= {name: total[name] + value for name, value in source_sums.items()}
    metrics = add_prefix("val", compute(total))
    if len(sums) > 1:
        for source, source_sums in sums.items():
            metrics |= {f"{name}/{source}": value for name, value in add_prefix("val", compute(source_sums)).items()}
    return metrics


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Add a prefix to all metric names, e.g. for the prefix "train": `{"loss": 1.0}` -> `{"train/loss": 1.0}`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
