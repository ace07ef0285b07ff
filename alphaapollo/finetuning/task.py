"""Interfaces of fine-tuning: a task (SFT, DPO, reward model), the plan of a run, and the running state.

files --read--> examples --make_batches--> a batch per group of ranks --worker--> sums --metrics--> metrics
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.controller.placement import Placement
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sources import LoadedExamples
from alphaapollo.data.stream import MixedStream, PromptStream
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint
from alphaapollo.launch.checkpoint_folder import RunProgress
from alphaapollo.launch.memory.finetuning import MemoryRequest
from alphaapollo.launch.memory.plan import MemoryPlan
from alphaapollo.launch.resume import StartPoint
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import Tracker
from alphaapollo.workers.finetuning_worker import FinetuningWorker

if TYPE_CHECKING:
    from alphaapollo.controller.handles import FinetuningGroup


class FinetuningTask(ABC):
    """Base class of a kind of fine-tuning, which defines its types of examples and batches. One object per run."""

    worker: type[FinetuningWorker[Any]]
    """Worker class of a rank."""

    def __init__(self, config: Any):
        self.config = config

    @abstractmethod
    def check_config(self, num_gpus: int) -> list[str]:
        """Check the configuration and the inputs that only this task reads. Returns notices.

        Raises ValueError for invalid settings.
        """

    @abstractmethod
    def read(self, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> LoadedExamples[Any]:
        """Read the examples of the files, in order. Raises ValueError for invalid rows."""

    @abstractmethod
    def make_memory_request(self, examples: Sequence[Any]) -> MemoryRequest:
        """Describe the memory that a run on these examples needs."""

    @abstractmethod
    def make_batches(self, examples: Sequence[Any], plan: FinetuningPlan) -> list[Any]:
        """Build the batches of one mini-batch, one per group of ranks."""

    @abstractmethod
    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute metrics from a batch's sums over all ranks, e.g. `loss`. The loop adds prefixes (train/loss)."""

    async def begin(self, run: FinetuningRun) -> None:
        """Prepare the run. Called before the first step, while the workers still hold the initial model."""
        return

    async def validate(self, run: FinetuningRun, step: int) -> dict[str, float]:
        """Return additional validation metrics that are not computed from validation examples."""
        return {}

    async def end(self) -> None:
        """Release what `begin` started. Called after success and failure."""
        return


@dataclass
class Progress(RunProgress):
    """State of the driver after `step` optimizer steps."""

    examples_consumed: int = 0  # position in the stream of examples
    validation: dict[str, float] = field(default_factory=dict)  # validation metrics of the step; empty: none


@dataclass(frozen=True)
class FinetuningPlan:
    """Checked configuration, data and resolved settings of a run."""

    task: FinetuningTask
    config: TuningConfig
    model: Model  # model section, with dtype and attention resolved
    placement: Placement
    max_tokens: int  # token budget of a micro-batch, over the ranks that share its rows
    train: LoadedExamples[Any]
    val: dict[str, list[Any]]  # validation examples by source
    stream: PromptStream | MixedStream
    total_steps: int
    start: StartPoint
    notices: list[str]
    memory: MemoryPlan | None  # memory of a rank's device; None: unknown

    @property
    def progress(self) -> Progress:
        """Return the progress of the checkpoint to resume, or of a new run."""
        return Progress.read(self.start.checkpoint) if self.start.checkpoint else Progress()

    @property
    def padded(self) -> bool:
        """Whether micro-batches are padded to their longest row."""
        return self.model.attention == "padded"

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
class FinetuningRun:
    """State of a running fine-tuning. A checkpoint saves `progress` and the state of the workers."""

    plan: FinetuningPlan
    trainer: FinetuningGroup[Any]
    progress: Progress
    saving: BackgroundCheckpoint[Progress]
    tracker: Tracker
    console: Console
