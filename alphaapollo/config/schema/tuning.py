"""Sections that main_sft, main_dpo and main_rm share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import CHANGES_ROUNDING, CHANGES_ROW_ORDER, CHANGES_ROWS, CountOrMinusOne, Section
from alphaapollo.config.schema.data import TrainingFiles
from alphaapollo.config.schema.model import Fsdp, Model, Optimizer
from alphaapollo.config.schema.sizes import find_ep_size_errors, find_group_size_errors
from alphaapollo.config.schema.trainer import LOCAL_HAS_ONE_RANK, Training


class TuningData(TrainingFiles):
    train_batch_size: PositiveInt = 32
    """Examples per optimizer step, over all ranks."""
    max_token_len_per_gpu: Annotated[PositiveInt | Literal["auto"], CHANGES_ROUNDING] = "auto"
    """Maximum tokens of a micro-batch per rank (times ulysses_sequence_parallel_size); auto = 16384, halved while the
    memory plan does not fit."""
    max_length: Annotated[PositiveInt, CHANGES_ROWS] = 2048
    """Maximum tokens per example."""
    truncation: Annotated[Literal["error", "left", "right", "drop"], CHANGES_ROWS] = "error"
    """For an example over max_length: stop the run, cut its start, cut its end, or drop it (counted)."""
    source_weights: Annotated[list[PositiveFloat] | None, CHANGES_ROW_ORDER] = None
    """Passes over each of train_files per epoch, e.g. [2,0.5] (the second file takes two epochs); null = one each."""

    def find_problems(self) -> Iterator[str]:
        files = [self.train_files] if isinstance(self.train_files, str) else self.train_files
        if self.source_weights is not None and len(self.source_weights) != len(files):
            weights = f"source_weights has {len(self.source_weights)} weights"
            yield f"{weights}, but train_files has {len(files)} files. Set one weight per file."


class TuningTrainer(Training):
    save_freq: CountOrMinusOne = -1
    """Write a checkpoint every so many steps, and at the end; -1 = never."""
    test_freq: CountOrMinusOne = -1
    """Validate every so many steps, and at the end; -1 = never."""
    log_freq: PositiveInt = 10
    """Write metrics every so many steps."""
    controller: Annotated[Literal["auto", "ray", "local"], LOCAL_HAS_ONE_RANK] = "auto"
    """ray = one worker process per rank; local = one rank in this process; auto = local for one rank, unless
    RAY_ADDRESS names a cluster."""


class TuningConfig(Section):
    data: TuningData = TuningData()
    model: Model = Model()
    optim: Optimizer = Optimizer(lr=1e-5)
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm."""
    fsdp_config: Fsdp = Fsdp()
    ulysses_sequence_parallel_size: Annotated[PositiveInt, CHANGES_ROUNDING] = 1
    """Ranks that share every sequence (Ulysses sequence parallelism). Must divide the ranks and the attention heads."""
    trainer: TuningTrainer = TuningTrainer()

    def find_problems(self) -> Iterator[str]:
        sizes = {
            "fsdp_config.fsdp_size": self.fsdp_config.fsdp_size,
            "ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size,
        }
        yield from find_group_size_errors(sizes, self.trainer)
        yield from find_ep_size_errors({"fsdp_config": self.fsdp_config}, self.trainer)
