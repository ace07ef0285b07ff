"""Length limits of prompts and training examples. Long ones are dropped, truncated or an error (data.truncation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alphaapollo.data.rendering import Renderer
from alphaapollo.types import Prompt

Truncation = Literal["error", "left", "right", "drop"]


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Number of prompts or training examples, and number and length of those over the length limit."""

    total: int  # number of prompts or examples
    too_long: int  # number of prompts or examples over the limit, which are dropped or truncated
    longest: int  # number of tokens of the longest prompt or example


def apply_length_limit(
    prompts: Sequence[Prompt], renderer: Renderer, max_prompt_length: int, truncation: Truncation
) -> tuple[list[Prompt], LengthSummary]:
    """Count the prompts with more than max_prompt_length tokens and, with truncation=drop, remove them.

    With truncation=left or right, long prompts are kept here and truncated when they are rendered (`truncate_prompt`).
    Raises ValueError if truncation is error and a prompt is too long, or no prompt remains.
    """
    lengths = [len(ids) for ids in renderer.encode_prompts([prompt.content for prompt in prompts])]
    rows = [prompt.id for prompt in prompts]
    counts = check_length_limit(lengths, rows, "prompts", "data.max_prompt_length", max_prompt_length, truncation)
    if truncation != "drop":
        return list(prompts), counts
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length], counts


def check_length_limit(
    lengths: Sequence[int], row_numbers: Sequence[int], noun: str, key: str, limit: int, truncation: Truncation
) -> LengthSummary:
    """Count the lengths over `limit`, the value of the config key `key`.

    Raises ValueError if some are too long and truncation=error, or all are too long and truncation=drop.

    Args:
        row_numbers: for each length, the number of its row in the data files, for messages.
        noun: plural noun for messages, e.g. "prompts".
    """
    long = [index for index, length in enumerate(lengths) if length > limit]
    counts = LengthSummary(len(lengths), len(long), max(lengths, default=0))
    if long and truncation == "error":
        raise ValueError(
            f"{len(long)} of {len(lengths)} {noun} are longer than {key}={limit}. The first is row "
            f"{row_numbers[long[0]]} with {lengths[long[0]]} tokens; the longest has {counts.longest}. Raise {key}, or "
            "set data.truncation to drop, left or right."
        )
    if long and truncation == "drop" and len(long) == len(lengths):
        raise ValueError(
            f"all {len(lengths)} {noun} are longer than {key}={limit} (the shortest has {min(lengths)} tokens), so "
            f"data.truncation=drop leaves none. Raise {key}."
        )
    return counts


def truncate_prompt(token_ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """Truncate a prompt to max_length tokens. truncation=left removes tokens at its start, right at its end."""
    if len(token_ids) <= max_length:
        return token_ids
    assert truncation in ("left", "right"), "check_length_limit rejects or drops such a prompt"
    return token_ids[-max_length:] if truncation == "left" else token_ids[:max_length]
