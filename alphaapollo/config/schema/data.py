"""`data`: files of training and validation, prompts and their choice."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_DATA,
    ActiveWhen,
    CountOrMinusOne,
    FilePath,
    PositiveRatio,
    Ratio,
    Requires,
    Section,
    TemplateArguments,
)

WHEN_ADAPTIVE_SAMPLER = ActiveWhen("/data.sampler", "difficulty", "frontier")
NEEDS_SHUFFLE = Requires(ActiveWhen("/data.shuffle", True))


class Chats(Section):
    """Keys of every `data` section with chats."""

    system_prompt: Annotated[str, CHANGES_DATA] = ""
    """System message of every chat that has none. A string prompt becomes a chat of this message and a user message
    (docs/data.md)."""
    allow_image_urls: bool = False
    """Download images that data rows give as http(s) addresses, when the run starts (docs/vision.md)."""
    apply_chat_template_kwargs: TemplateArguments = {}
    """Arguments of the chat template, e.g. {enable_thinking: false}."""


class TrainingFiles(Chats):
    """`data` section of every command that trains: files, order and number of rows."""

    train_files: Annotated[str | list[str], CHANGES_DATA, FilePath("data", required=True)] = ""
    """Training data: files, folders, globs, or OWNER/NAME[:config][@revision][#split] of the hub (required;
    docs/data.md)."""
    val_files: Annotated[str | list[str], FilePath("data")] = ""
    """Validation data, as train_files; empty = no validation."""
    shuffle: bool = True
    """Shuffle training rows each epoch (a function of data.seed and epoch)."""
    seed: int = 0
    """Seed of the shuffle, and of the rows chosen by train_max_samples and val_max_samples."""
    train_max_samples: CountOrMinusOne = -1
    """Maximum training rows: a random choice by data.seed, or the first rows without data.shuffle; -1 or 0 = all."""
    val_max_samples: CountOrMinusOne = -1
    """Maximum validation rows, chosen as for train_max_samples; -1 or 0 = all."""
    source_weights: list[PositiveFloat] | None = None
    """Share of each of train_files in the trained prompts, e.g. [0.7,0.3]; null = one pass over each file per epoch."""


class PromptData(Chats):
    """`data` section of every command whose model answers prompts."""

    prompt_key: Annotated[str, CHANGES_DATA] = "prompt"
    """Column of the prompt: a chat `[{role, content}]`, or a string that the model continues as it is."""
    ground_truth_key: Annotated[str, CHANGES_DATA] = ""
    """Column of the ground truth; empty = the columns of docs/data.md."""
    max_prompt_length: PositiveInt = 512
    """Maximum tokens of a rendered prompt."""
    max_response_length: PositiveInt = 512
    """Maximum tokens after the prompt, over all turns."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """For a prompt over max_prompt_length: stop the run, cut its start, cut its end, or drop the row (counted)."""

    @property
    def max_length(self) -> int:
        """Maximum tokens of a prompt and all that follows it."""
        return self.max_prompt_length + self.max_response_length


class Stage(Section):
    """Stage of a curriculum, an entry of `data.curriculum.stages`."""

    data_source: str
    """Pattern of the data sources whose prompts the stage adds, e.g. `math/*`."""
    metric: Annotated[str, Field(pattern="^(pass_rate|val/.+)$")] = "pass_rate"
    """Metric that opens the next stage: pass_rate = mean pass rate of this stage's prompts, or a validation metric."""
    threshold: Ratio = 0.8
    """Value of the metric at which the next stage opens."""


class Curriculum(Section):
    target: Annotated[float, Field(gt=0, lt=1), ActiveWhen("/data.sampler", "frontier")] = 0.5
    """Pass rate that frontier prefers."""
    revisit_rate: Annotated[PositiveRatio, WHEN_ADAPTIVE_SAMPLER] = 0.05
    """Weight of a prompt whose pass rate is at least 0.95, and with frontier the lowest weight of any prompt. A prompt
    that was never sampled has weight 1."""
    stages: Annotated[list[Stage], NEEDS_SHUFFLE] = []
    """Stages by data source: a prompt is drawn only after its stage has opened (docs/data.md); empty = all at
    once. E.g. [{data_source: easy/*, threshold: 0.8}, {data_source: "*"}]"""


class Reuse(Section):
    groups: NonNegativeInt = 0
    """Groups of recent iterations, with different rewards, that each iteration trains on again (docs/data.md);
    0 = off. Needs algorithm.rollout_correction.method, or a loss that includes the correction (DPPO, VESPO)."""
    max_age: Annotated[PositiveInt, ActiveWhen("groups")] = 4
    """Iterations for which a group can be reused after the one that generated it."""


class Data(PromptData, TrainingFiles):
    train_batch_size: Annotated[int, Field(gt=0, le=1_000_000)] = 32
    """Prompts (groups) per iteration."""
    sampler: Annotated[Literal["uniform", "difficulty", "frontier"], NEEDS_SHUFFLE] = "uniform"
    """Choice of training prompts: uniform = each once per epoch; difficulty = seldom those that nearly always or nearly
    never succeed; frontier = mostly those whose pass rate is near curriculum.target (docs/data.md)."""
    curriculum: Curriculum = Curriculum()
    reuse: Reuse = Reuse()

    @property
    def is_adaptive(self) -> bool:
        """Whether the choice of prompts depends on the results of earlier groups."""
        return self.sampler != "uniform" or bool(self.curriculum.stages)
