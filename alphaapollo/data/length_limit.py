"""Length limits of prompts and examples: drop, truncate or reject long ones (data.truncation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alphaapollo.data.rendering import Renderer
from alphaapollo.types import Prompt

Truncation = Literal["error", "left", "right", "drop"]


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Length statistics of the prompts or examples of a run."""

    total: int  # number of prompts or examples
    too_long: int  # number over the limit, dropped or truncated
    longest: int  # length of the longest in tokens


def apply_length_limit(
    prompts: Sequence[Prompt], renderer: Renderer, max_prompt_length: int, truncation: Truncation
) -> tuple[list[Prompt], LengthSummary]:
    """Apply the length limit to the prompts, once, before training.

    truncation=drop removes long prompts. With left and right, `truncate_prompt` truncates long prompts when rendered.
    Raises ValueError if truncation is error and a prompt is too long, or no prompt remains.
    """
    lengths = [len(ids) for ids in renderer.encode_prompts([prompt.content for prompt in prompts])]
    rows = [prompt.id for prompt in prompts]
    counts = check_length_limit(lengths, rows, "prompts", "data.max_prompt_length", max_prompt_length, truncation)
    if truncation != "drop":
        return list(prompts), counts
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length], counts


def check_length_limit(
    lengths: Sequence[int], rows: Sequence[int], kind: str, key: str, limit: int, truncation: Truncation
) -> LengthSummary:
    """Count lengths over the limit of the config key `key`.

    Raises ValueError if some are too long and truncation=error, or all are too long and truncation=drop.
    """
    long = [index for index, length in enumerate(lengths) if length > limit]
    counts = LengthSummary(len(lengths), len(long), max(lengths, default=0))
    if long and truncation == "error":
        raise ValueError(
            f"{len(long)} of {len(lengths)} {kind} are longer than {key}={limit}. The first is row {rows[long[0]]} "
            f"with {lengths[long[0]]} tokens; the longest has {counts.longest}. Raise {key}, or set data.truncation to "
            "drop, left or right."
        )
    if long and truncation == "drop" and len(long) == len(lengths):
        raise ValueError(
            f"all {len(lengths)} {kind} are longer than {key}={limit} (the shortest has {min(lengths)} tokens), so "
            f"data.truncation=drop leaves none. Raise {key}."
        )
    return counts


def truncate_prompt(token_ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """Truncate token ids to max_length: truncation=left removes the start, right removes the end."""
    if len(token_ids) <= max_length:
        return token_ids
    assert truncation in ("left", "right"), "check_length_limit rejects or drops such a prompt"
    return token_ids[-max_length:] if truncation == "left" else token_ids[:max_length]
