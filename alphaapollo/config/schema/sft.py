"""The whole configuration of main_sft."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Frequency, Scalar, Section
from alphaapollo.config.schema.model import Fsdp, LoraForm, Model, Optimizer
from alphaapollo.config.schema.trainer import RunFolder


class SftData(Section):
    train_files: str | list[str] = ""
    """Training data: parquet or jsonl with a `messages` column, or prompt and response columns (required)."""
    val_files: str | list[str] = ""
    """Validation data, as train_files; empty = none."""
    messages_key: str = "messages"
    """Column with the whole chat; the assistant's messages are trained on."""
    prompt_key: str = "prompt"
    """Column with the prompt, where there is no messages column."""
    response_key: str = "response"
    """Column with the response, where there is no messages column."""
    train_batch_size: PositiveInt = 32
    """Examples an optimiser step, over all ranks."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Tokens of one micro-batch at most, on each rank (ranks that share sequences: together so many times more)."""
    max_length: PositiveInt = 2048
    """Tokens of an example at most."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """What to do with a longer example."""
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


class SftTrainer(RunFolder):
    experiment_name: str = "sft"
    """Second folder of the run under output_dir."""
    logger: list[Literal["console", "tensorboard", "wandb"]] = ["console"]
    """Trackers besides metrics.jsonl."""
    total_epochs: PositiveInt = 1
    """Passes over the data, unless total_training_steps is given."""
    total_training_steps: PositiveInt | None = None
    """Optimiser steps; null = from total_epochs."""
    save_freq: Frequency = -1
    """Checkpoint every so many steps, and at the end; -1 = never."""
    max_ckpt_to_keep: PositiveInt | None = 2
    """Older checkpoints are removed; null = keep all."""
    test_freq: Frequency = -1
    """Validation loss every so many steps, and at the end; -1 = never."""
    log_freq: PositiveInt = 10
    """Write metrics every so many steps."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """As in main_ppo."""
    resume_from_path: str = ""
    """A checkpoint folder, for resume_mode=resume_path."""
    export_hf: bool = True
    """At the end, write the model as a Hugging Face folder: <run>/model."""
    export_lora: LoraForm = "merged"
    """As in main_ppo."""
    on_bad_step: Literal["stop", "skip"] = "stop"
    """An optimiser step whose gradient is not finite: stop = end the run there; skip = leave it out, count it
    (train/steps_skipped), and go on, unless many are bad in a row."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    cpu_threads: PositiveInt | None = None
    """Torch threads of a rank; null = cores / ranks of a node, and where a run goes on without a GPU the count that it
    began with."""
    seed: int = 0
    """Seed of everything that is drawn."""
    dry_run: bool = False
    """Compose, check, print the plan, and stop."""


class SftConfig(Section):
    """The whole configuration of main_sft. The number of ranks is torchrun's (one without it)."""

    data: SftData = SftData()
    model: Model = Model()
    optim: Optimizer = Optimizer(lr=1e-5)
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    fsdp_config: Fsdp = Fsdp()
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence, each with a part of its tokens and, in attention, of the heads (Ulysses). Must
    divide the ranks and the model's attention heads."""
    trainer: SftTrainer = SftTrainer()
