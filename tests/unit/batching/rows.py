"""Rows and their layout on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alphaapollo.batching.packing import BatchLayout, build_batch_layout
from alphaapollo.types import Row


def make_row(prompt: Sequence[int], response: Sequence[int], mask: Sequence[int] | None = None) -> Row:
    """Row of a prompt and a response. The log-prob of an action token is minus its id."""
    mask = mask or [1] * len(response)
    logprobs = [0.0] * len(prompt) + [-float(token) * m for token, m in zip(response, mask, strict=True)]
    tokens = [*prompt, *response]
    return Row(tokens, [0] * len(prompt) + list(mask), logprobs, [len(tokens) - 1])


def lay_out(
    rows: Sequence[Row],
    owners: Sequence[int] | None = None,
    num_ranks: int = 1,
    mini_batch_size: int = 10**6,
    max_tokens: int = 64,
    padded: bool = True,
    seed: int = 0,
    shuffle: bool = False,
    **more: Any,
) -> BatchLayout:
    """Batch of rows that are one trajectory each unless `owners` is given."""
    owners = range(len(rows)) if owners is None else owners
    return build_batch_layout(rows, owners, num_ranks, mini_batch_size, max_tokens, padded, seed, shuffle, **more)
