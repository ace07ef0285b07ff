"""What a kind of fine-tuning is: SFT (sft.py), and what comes beside it. The skeleton does everything else.

files --read--> examples --deal--> a batch for each group of ranks --worker--> sums --figures--> metrics
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from alphaapollo.config.diff import Verdict
from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.data.batch import TunedBatch
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sources import Read
from alphaapollo.finetuning.layout import Layout

if TYPE_CHECKING:
    from alphaapollo.finetuning.loop import TuningRun
    from alphaapollo.workers.finetuning_worker import FinetuningWorker
    from alphaapollo.workers.process_group import RankPlacement

C = TypeVar("C", bound=TuningConfig)
E = TypeVar("E")
B = TypeVar("B", bound=TunedBatch)


@dataclass(frozen=True)
class MemoryRequest:
    """What memory is planned by."""

    longest: int  # tokens of the longest row
    rows: int = 1  # of an example, which stay together
    head: bool = True  # log-probs over the vocabulary are computed, not one number a row
    reference: bool = False  # a frozen copy of the model lies beside it (with LoRA the base is one anyway)
    answers: tuple[int, int, int] | None = None  # sampled at a time on a rank: how many, tokens of prompt, of answer


class Station(ABC, Generic[C, E, B]):
    """One object a run. C: its configuration; E: an example; B: a batch."""

    @abstractmethod
    def check(self, config: C, num_gpus: int) -> list[str]:
        """Notices about keys without effect. ConfigError names every impossible combination (check_tuning)."""

    @abstractmethod
    def change_rule(self, key: str) -> tuple[Verdict, str]:
        """What becomes of a key that has changed since the run's earlier start."""

    @abstractmethod
    def read(self, config: C, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> Read[E]:
        """The examples of the files, in order; ValueError names bad rows."""

    def read_more(self, config: C) -> list[str]:
        """What else is read before the start; what to tell about it."""
        return []

    @abstractmethod
    def demand(self, config: C, examples: Sequence[E]) -> MemoryRequest:
        """Of a run on these examples."""

    @abstractmethod
    def deal(self, config: C, examples: Sequence[E], layout: Layout) -> list[B]:
        """A batch for each group of ranks, of one mini-batch."""

    @abstractmethod
    def builder(
        self, config: C, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], FinetuningWorker[B]]:
        """How a rank's worker is built: called in its own process, so workers are imported inside. model: resolved."""

    @abstractmethod
    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """From a batch's sums over all ranks to figures, e.g. `loss`: train/loss, val/loss, val/loss/<source>."""

    async def begin(self, run: TuningRun[C, E, B]) -> None:
        """Before the first step and before a checkpoint is read: the workers hold the model that the run began with."""
        return

    async def validate(self, run: TuningRun[C, E, B], step: int) -> dict[str, float]:
        """Metrics of a validation after this step, besides the figures of the validation examples."""
        return {}

    async def end(self) -> None:
        """The run is over, or has failed: what `begin` has started ends."""
        return
