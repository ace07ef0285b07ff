"""Shared prefixes of rows, which a forward pass computes once.

    [P, a], [P, b], [P, c]  ->  P, a, b, c         P attends to itself; a, b and c attend to P and themselves

Known as PrefixGrouper (arXiv 2506.05433). A row belongs to one family of rows of its prompt group.
Samples of a prompt share the prompt; rows of the memory context share the common prefix of their prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from alphaapollo.types import Row

SHARE_FROM = 1.2  # minimum ratio of row tokens to computed tokens for a shared layout


@dataclass(frozen=True)
class Prefixes:
    """Shared prefixes of R rows. Rows of one family begin with the same tokens. A row that shares no prefix is a family
    of one, with its complete prompt as prefix."""

    ids: np.ndarray  # int64 [R]: family of each row
    lengths: np.ndarray  # int64 [R]: tokens of the prefix, at least 1, at most the prompt

    def select(self, positions: Sequence[int]) -> Prefixes:
        return Prefixes(self.ids[list(positions)], self.lengths[list(positions)])

    def segments(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Segments that a forward pass over rows of `lengths` [R] computes: one per family and the rest of each row.
        Returns their lengths and the prefix tokens that each attends to. int64 [families + R] each"""
        first = np.unique(self.ids, return_index=True)[1]
        shared, rest = self.lengths[first], lengths - self.lengths
        return np.concatenate([shared, rest]), np.concatenate([np.zeros_like(shared), self.lengths])


def decide_sharing(
    key: str, wanted: bool | Literal["auto"], problem: str | None, notify: Callable[[str], None]
) -> bool:
    """Whether prompts are shared: if `key` is true or auto, and there is no `problem`. Raises ValueError if it is true
    nevertheless; for auto, the problem is shown."""
    if problem and wanted is True:
        raise ValueError(f"{key}=true: {problem}. Set it to auto or false.")
    if problem and wanted == "auto":
        notify(f"prompts are computed for each sample separately ({key}): {problem}.")
    return wanted is not False and not problem


def find_prefixes(rows: Sequence[Row], group_ids: Sequence[int]) -> Prefixes:
    """Find the shared prefixes of each prompt group: equal prompts, or the families that save the most tokens.

    group_ids: [R], the prompt group of each row.
    """
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        groups.setdefault(group, []).append(index)
    ids, lengths = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    count = 0
    for members in groups.values():
        prompts = [rows[index].token_ids[: rows[index].response_start] for index in members]
        for family, length in _find_families(prompts):
            own = [members[index] for index in family]
            ids[own], lengths[own] = count, length
            count += 1
    return Prefixes(ids, lengths)


def _find_families(prompts: list[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Families of prompts and the length of their shared prefix, by dynamic programming over the sorted prompts: a
    family of n that shares p tokens saves (n - 1) p."""
    if all(prompt == prompts[0] for prompt in prompts):
        return [(list(range(len(prompts))), len(prompts[0]))]
    order = sorted(range(len(prompts)), key=lambda index: list(prompts[index]))
    ordered = [np.array(prompts[index]) for index in order]
    alike = np.array([_common_prefix_length(a, b) for a, b in pairwise(ordered)])
    saved, first = np.zeros(len(order) + 1, dtype=np.int64), np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):  # of the first `end` prompts; the last family is `first[end]` .. end - 1
        shares = np.minimum.accumulate(alike[: end - 1][::-1])
        gains = saved[:end][::-1] + np.concatenate([[0], np.arange(1, end) * shares])
        back = int(gains.argmax())
        saved[end], first[end] = gains[back], end - 1 - back
    families, end = [], len(order)
    while end:
        start = int(first[end])
        share = int(alike[start : end - 1].min()) if end - start > 1 else len(ordered[start])
        families.append((order[start:end], share))
        end = start
    return families


def _common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
