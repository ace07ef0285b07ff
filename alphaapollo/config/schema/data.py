"""`data`: the prompts of main_ppo."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_DATA,
    CHANGES_ROW_ORDER,
    CHANGES_ROWS,
    CHANGES_VALIDATION,
    CountOrMinusOne,
    FilePath,
    Section,
    TemplateArguments,
)


class TrainingFiles(Section):
    """`data` section of every command that trains: files, order and number of rows."""

    train_files: Annotated[str | list[str], CHANGES_DATA, FilePath("data", required=True)] = ""
    """Training data: one or several parquet or jsonl files (required)."""
    val_files: Annotated[str | list[str], CHANGES_VALIDATION, FilePath("data")] = ""
    """Validation data, as train_files; empty = no validation."""
    shuffle: Annotated[bool, CHANGES_ROW_ORDER] = True
    """Shuffle training rows each epoch (a function of data.seed and epoch)."""
    seed: Annotated[int, CHANGES_ROW_ORDER] = 0
    """Seed of the shuffle, and of the rows chosen by train_max_samples and val_max_samples."""
    train_max_samples: Annotated[CountOrMinusOne, CHANGES_ROW_ORDER] = -1
    """Maximum training rows, drawn by data.seed, or the first ones without data.shuffle; -1 or 0 = all."""
    val_max_samples: Annotated[CountOrMinusOne, CHANGES_VALIDATION] = -1
    """Maximum validation rows, chosen as for train_max_samples; -1 or 0 = all."""
    allow_image_urls: bool = False
    """Download pictures that data rows give as http(s) addresses, when the run starts (docs/vision.md)."""
    apply_chat_template_kwargs: TemplateArguments = {}
    """Arguments of the chat template, e.g. {enable_thinking: false}."""


class PromptData(Section):
    """`data` section of every command whose model answers prompts."""

    prompt_key: Annotated[str, CHANGES_DATA] = "prompt"
    """Column of the prompt: a chat `[{role, content}]`, or a string that the model continues as it is."""
    max_prompt_length: Annotated[PositiveInt, CHANGES_ROWS] = 512
    """Maximum tokens of a rendered prompt."""
    max_response_length: PositiveInt = 512
    """Maximum tokens after the prompt, over all turns."""
    truncation: Annotated[Literal["error", "left", "right", "drop"], CHANGES_ROWS] = "error"
    """For a prompt over max_prompt_length: stop the run, cut its start, cut its end, or drop the row (counted)."""
    allow_image_urls: bool = False
    """Download pictures that data rows give as http(s) addresses, when the run starts (docs/vision.md)."""
    apply_chat_template_kwargs: TemplateArguments = {}
    """Arguments of the chat template, e.g. {enable_thinking: false}."""

    @property
    def max_length(self) -> int:
        """Maximum tokens of a prompt and all that follows it."""
        return self.max_prompt_length + self.max_response_length


class Data(PromptData, TrainingFiles):
    train_batch_size: PositiveInt = 32
    """Prompts (groups) per iteration."""
