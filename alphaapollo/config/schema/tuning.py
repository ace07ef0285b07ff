"""What the configurations of all kinds of fine-tuning have in common: SFT (sft.py), and what comes beside it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Frequency, Scalar, Section
from alphaapollo.config.schema.model import Fsdp, Model, Optimizer
from alphaapollo.config.schema.trainer import Training


class TuningData(Section):
    train_files: str | list[str] = ""
    """Training data: one or several parquet or jsonl files (required). Each is a source."""
    val_files: str | list[str] = ""
    """Validation data, as train_files; of several files each has its own figures, too. Empty = none."""
    train_batch_size: PositiveInt = 32
    """Examples an optimiser step, over all ranks."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Tokens of one micro-batch at most, on each rank (ranks that share sequences: together so many times more)."""
    max_length: PositiveInt = 2048
    """Tokens of an example at most."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """What to do with a longer example."""
    source_weights: list[PositiveFloat] | None = None
    """How often an epoch passes over each of train_files, e.g. [2,0.5]: twice over the first, over half of the second,
    and over its other half in the next epoch; null = once over each."""
    shuffle: bool = True
    """Shuffle anew each epoch (a function of data.seed and the epoch)."""
    seed: int = 0
    """Seed of the shuffle, and of the choice that train_max_samples and val_max_samples make."""
    train_max_samples: int = Field(default=-1, ge=-1)
    """Training examples at most: so many, drawn by data.seed, or the first ones without data.shuffle; -1 or 0 = all."""
    val_max_samples: int = Field(default=-1, ge=-1)
    """Validation examples at most, chosen as train_max_samples chooses; -1 or 0 = all."""
    apply_chat_template_kwargs: dict[str, Scalar] = {}
    """Arguments of the chat template, given at every rendering, e.g. {enable_thinking: false}."""


class TuningTrainer(Training):
    total_epochs: PositiveInt = 1
    """Passes over the data, unless total_training_steps is given."""
    save_freq: Frequency = -1
    """Checkpoint every so many steps, and at the end; -1 = never."""
    test_freq: Frequency = -1
    """Validate every so many steps, and at the end; -1 = never."""
    log_freq: PositiveInt = 10
    """Write metrics every so many steps."""
    on_bad_step: Literal["stop", "skip"] = "stop"
    """An optimiser step whose gradient is not finite: stop = end the run there; skip = leave it out, count it
    (train/steps_skipped), and go on, unless many are bad in a row."""
    controller: Literal["auto", "ray", "local"] = "auto"
    """ray = a worker process a rank; local = one rank, in this process; auto = local for one rank, unless RAY_ADDRESS
    names a cluster."""


class TuningConfig(Section):
    data: TuningData = TuningData()
    model: Model = Model()
    optim: Optimizer = Optimizer(lr=1e-5)
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    fsdp_config: Fsdp = Fsdp()
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence, each with a part of its tokens and, in attention, of the heads (Ulysses). Must
    divide the ranks and the model's attention heads."""
    trainer: TuningTrainer = TuningTrainer()
