"""`data`: the prompts of main_ppo."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from alphaapollo.config.schema.base import Scalar, Section


class Data(Section):
    train_files: str | list[str] = ""
    """Training data: one or several parquet or jsonl files (required for training)."""
    val_files: str | list[str] = ""
    """Validation data, as train_files; empty = no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a chat `[{role, content}]`, or a string that the model continues as it is."""
    train_batch_size: PositiveInt = 32
    """Prompts (groups) an iteration."""
    max_prompt_length: PositiveInt = 512
    """Tokens of a rendered prompt at most."""
    max_response_length: PositiveInt = 512
    """Tokens that follow the prompt at most, over all turns."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """A prompt over max_prompt_length: stop the run, cut its start, cut its end, or leave the row out (counted)."""
    shuffle: bool = True
    """Shuffle the training rows anew each epoch (a function of data.seed and the epoch)."""
    seed: int = 0
    """Seed of the shuffle, and of the choice that train_max_samples and val_max_samples make."""
    train_max_samples: int = Field(default=-1, ge=-1)
    """Training rows at most: so many, drawn by data.seed, or the first ones without data.shuffle; -1 or 0 = all."""
    val_max_samples: int = Field(default=-1, ge=-1)
    """Validation rows at most, chosen as train_max_samples chooses; -1 or 0 = all."""
    apply_chat_template_kwargs: dict[str, Scalar] = {}
    """Arguments of the chat template, given at every rendering, e.g. {enable_thinking: false}."""
