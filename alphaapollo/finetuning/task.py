"""Interfaces of fine-tuning: a task (SFT, DPO, reward model), the plan of a run, and the running state.

files --read--> examples --make_batches--> a batch per group of ranks --worker--> sums --metrics--> metrics
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.controller.placement import Placement
from alphaapollo.data.batch import FinetuningBatch
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sources import LoadedExamples
from alphaapollo.data.stream import MixedStream, PromptStream
from alphaapollo.finetuning.layout import Layout
from alphaapollo.finetuning.progress import Progress
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint
from alphaapollo.launch.memory.finetuning import MemoryRequest
from alphaapollo.launch.memory.plan import MemoryPlan
from alphaapollo.launch.resume import StartPoint
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import Tracker

if TYPE_CHECKING:
    from alphaapollo.controller.handles import FinetuningGroup
    from alphaapollo.workers.finetuning_worker import FinetuningWorker
    from alphaapollo.workers.process_group import RankPlacement

C = TypeVar("C", bound=TuningConfig)
E = TypeVar("E")
B = TypeVar("B", bound=FinetuningBatch)


class FinetuningTask(ABC, Generic[C, E, B]):
    """One kind of fine-tuning; one object per run. C: its configuration; E: an example; B: a batch."""

    @abstractmethod
    def check(self, config: C, num_gpus: int) -> list[str]:
        """Return notices about keys without effect. Raises ConfigError for impossible combinations."""

    @abstractmethod
    def read(self, config: C, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> LoadedExamples[E]:
        """Read the examples of the files, in order. Raises ValueError for invalid rows."""

    def read_more(self, config: C) -> list[str]:
        """Read further inputs before the start. Returns notices."""
        return []

    @abstractmethod
    def memory_request(self, config: C, examples: Sequence[E]) -> MemoryRequest:
        """Describe what a run on these examples needs."""

    @abstractmethod
    def make_batches(self, config: C, examples: Sequence[E], layout: Layout) -> list[B]:
        """Build the batches of one mini-batch, one per group of ranks."""

    @abstractmethod
    def worker_builder(
        self, config: C, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], FinetuningWorker[B]]:
        """Return a function that builds a rank's worker in its process (workers are imported inside). model:
        resolved."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute metrics from a batch's sums over all ranks, e.g. `loss` for train/loss, val/loss,
        val/loss/<source>."""

    async def begin(self, run: FinetuningRun[C, E, B]) -> None:
        """Prepare the run. Called before the first step, while the workers still hold the initial model."""
        return

    async def validate(self, run: FinetuningRun[C, E, B], step: int) -> dict[str, float]:
        """Return validation metrics besides those of the validation examples."""
        return {}

    async def end(self) -> None:
        """Release what `begin` started. Called after success and failure."""
        return


@dataclass(frozen=True)
class FinetuningPlan(Generic[C, E, B]):
    """A run that has passed all checks."""

    task: FinetuningTask[C, E, B]
    config: C
    model: Model  # with resolved dtype and attention
    counts: Placement
    layout: Layout
    train: LoadedExamples[E]
    val: dict[str, list[E]]  # by source
    stream: PromptStream | MixedStream
    total_steps: int
    start: StartPoint
    notices: list[str]
    memory: MemoryPlan | None  # of a rank's device; None: unknown

    @property
    def progress(self) -> Progress:
        """Progress of the checkpoint, or of a new run."""
        return Progress.read(self.start.checkpoint) if self.start.checkpoint else Progress()

    def resumed(self, config: Any, start: StartPoint) -> FinetuningPlan[C, E, B]:
        """Return the same plan with another starting point."""
        return replace(self, config=config, start=start)

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written during the next steps."""
        return self.memory is None or self.memory.saves_in_background

    @property
    def is_complete(self) -> bool:
        """Whether no step remains and the model is exported."""
        exported = self.start.is_exported() or not self.config.trainer.export_hf
        return self.start.step >= self.total_steps and exported


@dataclass
class FinetuningRun(Generic[C, E, B]):
    """A running fine-tuning. Its state is `progress` and what the workers hold."""

    plan: FinetuningPlan[C, E, B]
    trainer: FinetuningGroup[B]
    progress: Progress
    saving: BackgroundCheckpoint[Progress]
    tracker: Tracker
    console: Console

    def make_batches(self, examples: Sequence[E]) -> list[B]:
        """Build the batches of one mini-batch, one per group of ranks."""
        return self.plan.task.make_batches(self.plan.config, examples, self.plan.layout)
