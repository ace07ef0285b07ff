"""Prompt prefixes that several token sequences (rows) share, and that a forward pass computes only once.

    [P, a], [P, b], [P, c]  ->  P, a, b, c         P attends to itself; a, b and c attend to P and themselves

Known as PrefixGrouper (arXiv 2506.05433). Samples of one prompt share the complete prompt. If each turn of an episode
has its own prompt (env.context=memory), turns share the common beginning of their prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from alphaapollo.data.images import find_placeholders
from alphaapollo.types import Row

MIN_SHARING_RATIO = 1.2  # prefixes are shared if tokens of all rows / computed tokens is at least this


@dataclass(frozen=True)
class SharedPrompts:
    """Prefix of each of R rows. Rows with equal prefix ids begin with the same tokens. If a row shares no tokens with
    other rows, its prefix is its complete prompt."""

    prefix_ids: np.ndarray  # int64 [R], equal for rows that share a prefix
    lengths: np.ndarray  # int64 [R], length of the prefix in tokens: at least 1, at most the prompt length

    def select(self, row_indices: Sequence[int]) -> SharedPrompts:
        return SharedPrompts(self.prefix_ids[list(row_indices)], self.lengths[list(row_indices)])

    def get_segment_and_prefix_lengths(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of the sequences that a forward pass computes: each prefix, then the rest of each row.

        Returns two int64 arrays [prefixes + R]: number of tokens of each sequence, and number of preceding prefix
        tokens that it also attends to (0 for a prefix). `lengths` [R]: lengths of the rows, including their prefixes.
        """
        _, first_rows = np.unique(self.prefix_ids, return_index=True)  # first row of each prefix
        shared, rest = self.lengths[first_rows], lengths - self.lengths
        return np.concatenate([shared, rest]), np.concatenate([np.zeros_like(shared), self.lengths])


def decide_shared_prompts(
    key: str, setting: bool | Literal["auto"], obstacle: str | None, notify: Callable[[str], None]
) -> bool:
    """Return whether forward passes compute a shared prompt only once, for the value `setting` of the config key `key`.
    If the model cannot share prompts (`obstacle` says why), true raises ValueError and auto calls `notify`."""
    if obstacle and setting is True:
        raise ValueError(f"{key}=true is not possible: {obstacle}. Set {key} to auto or false.")
    if obstacle and setting == "auto":
        notify(f"prompts are computed for each sample separately ({key}=auto): {obstacle}.")
    return setting is not False and not obstacle


def find_shared_prompts(rows: Sequence[Row], group_ids: Sequence[int]) -> SharedPrompts:
    """Choose the shared prefix of each row such that forward passes save the most tokens, among rows of the same prompt
    group (`group_ids` [R])."""
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        groups.setdefault(group, []).append(index)
    ids, lengths = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    num_prefixes = 0
    for members in groups.values():
        image_numbers: dict[str, int] = {}
        prompts = [_make_comparable_prompt(rows[index], image_numbers) for index in members]
        for indices, length in _group_by_prefix(prompts):
            sharing_rows = [members[index] for index in indices]
            ids[sharing_rows], lengths[sharing_rows] = num_prefixes, length
            num_prefixes += 1
    return SharedPrompts(ids, lengths)


def _make_comparable_prompt(row: Row, image_numbers: dict[str, int]) -> Sequence[int]:
    """Return the token ids of a row's prompt. A negative number that identifies an image replaces its placeholders,
    so that prompts with different images differ and no shared prefix ends inside an image. `image_numbers`: digest of
    an image -> its number; new images are added."""
    prompt = row.token_ids[: row.response_start]
    if not row.images:
        return prompt
    tokens, start = np.array(row.token_ids), 0
    placeholders = find_placeholders(tokens, row.images)
    for image in row.images:
        number = image_numbers.setdefault(image.digest, -1 - len(image_numbers))
        tokens[placeholders[start : start + image.num_placeholders]] = number
        start += image.num_placeholders
    numbered: list[int] = tokens[: len(prompt)].tolist()
    return numbered


def _group_by_prefix(prompts: list[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Group prompts that share a prefix, so that the most tokens are saved: n prompts that share p tokens save (n - 1)
    p. Returns (indices of prompts, length of their prefix) of each group."""
    if all(prompt == prompts[0] for prompt in prompts):
        return [(list(range(len(prompts))), len(prompts[0]))]
    order = sorted(range(len(prompts)), key=lambda index: list(prompts[index]))
    ordered = [np.array(prompts[index]) for index in order]
    common_lengths = np.array([_common_prefix_length(a, b) for a, b in pairwise(ordered)])
    saved, first = np.zeros(len(order) + 1, dtype=np.int64), np.zeros(len(order) + 1, dtype=np.int64)
    # saved[end]: tokens saved in the first `end` sorted prompts, whose last group is first[end] .. end - 1
    for end in range(1, len(order) + 1):
        prefix_lengths = np.minimum.accumulate(common_lengths[: end - 1][::-1])  # of last groups of 2 to `end` prompts
        gains = saved[:end][::-1] + np.concatenate([[0], np.arange(1, end) * prefix_lengths])
        num_others = int(gains.argmax())  # prompts in the last group, beside prompt end - 1
        saved[end], first[end] = gains[num_others], end - 1 - num_others
    groups, end = [], len(order)
    while end:
        start = int(first[end])
        prefix_length = int(common_lengths[start : end - 1].min()) if end - start > 1 else len(ordered[start])
        groups.append((order[start:end], prefix_length))
        end = start
    return groups


def _common_prefix_length(first_tokens: np.ndarray, second_tokens: np.ndarray) -> int:
    size = min(len(first_tokens), len(second_tokens))
    differs = first_tokens[:size] != second_tokens[:size]
    return int(differs.argmax()) if differs.any() else size
