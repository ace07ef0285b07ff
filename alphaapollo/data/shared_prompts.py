"""Shared prefixes of rows, which a forward pass computes once.

    [P, a], [P, b], [P, c]  ->  P, a, b, c         P attends to itself; a, b and c attend to P and themselves

Known as PrefixGrouper (arXiv 2506.05433). A family is a set of rows of one prompt group that share a prefix. Samples of
a prompt share the prompt; rows of the memory context share the common prefix of their prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from alphaapollo.types import Row

MIN_SHARING_RATIO = 1.2  # prefixes are shared if row tokens / computed tokens is at least this ratio


@dataclass(frozen=True)
class SharedPrefixes:
    """Shared prefixes of R rows. Rows of one family start with equal tokens.

    A row that shares no prefix is a family of one row, with the complete prompt as prefix.
    """

    ids: np.ndarray  # int64 [R], family of each row
    lengths: np.ndarray  # int64 [R], length of the prefix in tokens: at least 1, at most the prompt length

    def select(self, positions: Sequence[int]) -> SharedPrefixes:
        return SharedPrefixes(self.ids[list(positions)], self.lengths[list(positions)])

    def segments(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the segments that a forward pass computes: one per family, and the remainder of each row.

        lengths: [R] row lengths. Returns the length of each segment and the number of prefix tokens that the segment
        also attends to, int64 [families + R] each.
        """
        first = np.unique(self.ids, return_index=True)[1]
        shared, rest = self.lengths[first], lengths - self.lengths
        return np.concatenate([shared, rest]), np.concatenate([np.zeros_like(shared), self.lengths])


def decide_prompt_sharing(
    key: str, setting: bool | Literal["auto"], reason: str | None, notify: Callable[[str], None]
) -> bool:
    """Return whether to share prompts, from the value `setting` of the config key `key`.

    reason: why prompts cannot be shared; None if they can. Raises ValueError if the setting is True and there is a
    reason; for "auto", calls `notify` with the reason.
    """
    if reason and setting is True:
        raise ValueError(f"{key}=true is not possible: {reason}. Set {key} to auto or false.")
    if reason and setting == "auto":
        notify(f"prompts are computed for each sample separately ({key}=auto): {reason}.")
    return setting is not False and not reason


def find_shared_prefixes(rows: Sequence[Row], group_ids: Sequence[int]) -> SharedPrefixes:
    """Find the shared prefixes of each prompt group: equal prompts, or the families that save the most tokens.

    group_ids: [R] prompt group of each row.
    """
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        groups.setdefault(group, []).append(index)
    ids, lengths = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    count = 0
    for members in groups.values():
        prompts = [rows[index].token_ids[: rows[index].response_start] for index in members]
        for family, length in _find_families(prompts):
            family_rows = [members[index] for index in family]
            ids[family_rows], lengths[family_rows] = count, length
            count += 1
    return SharedPrefixes(ids, lengths)


def _find_families(prompts: list[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Find families of prompts by dynamic programming over the sorted prompts. Returns (indices, prefix length).

    A family of n prompts that share p tokens saves (n - 1) p tokens.
    """
    if all(prompt == prompts[0] for prompt in prompts):
        return [(list(range(len(prompts))), len(prompts[0]))]
    order = sorted(range(len(prompts)), key=lambda index: list(prompts[index]))
    ordered = [np.array(prompts[index]) for index in order]
    common_lengths = np.array([_common_prefix_length(a, b) for a, b in pairwise(ordered)])
    saved, first = np.zeros(len(order) + 1, dtype=np.int64), np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(
        1, len(order) + 1
    ):  # saved[end]: tokens saved in the first `end` prompts; first[end] .. end - 1 is the last family
        shares = np.minimum.accumulate(common_lengths[: end - 1][::-1])
        gains = saved[:end][::-1] + np.concatenate([[0], np.arange(1, end) * shares])
        back = int(gains.argmax())
        saved[end], first[end] = gains[back], end - 1 - back
    families, end = [], len(order)
    while end:
        start = int(first[end])
        share = int(common_lengths[start : end - 1].min()) if end - start > 1 else len(ordered[start])
        families.append((order[start:end], share))
        end = start
    return families


def _common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two token arrays."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
