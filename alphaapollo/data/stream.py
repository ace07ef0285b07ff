"""Endless order of training prompts, a pure function of the seed and the position.

A checkpoint only saves the position, i.e. the number of prompts used so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from alphaapollo.utils.seeds import derive_seed

R = TypeVar("R")


def choose_rows(rows: Sequence[R], max_rows: int, seed: int, shuffle: bool) -> list[R]:
    """Choose max_rows rows (0, -1: all) in their order: random rows if shuffle is True, else the first rows."""
    if shuffle and 0 < max_rows < len(rows):
        rng = np.random.default_rng(derive_seed(seed, "max_samples"))
        return [rows[index] for index in sorted(rng.choice(len(rows), size=max_rows, replace=False))]
    return list(rows[:max_rows] if max_rows > 0 else rows)


class PromptStream:
    """Endless sequence of prompt indices, shuffled differently in each epoch, or in file order if shuffle is False. The
    first epoch begins at position `start` of the training run: 0, or the position at which the data has changed."""

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, start: int = 0):
        self.num_prompts, self._start = num_prompts, start
        self._seed, self._shuffle = seed, shuffle
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def prompt_indices(self, start: int, count: int) -> list[int]:
        """Return the indices of `count` prompts, beginning with the one at position `start` of the training run."""
        first = start - self._start
        slots = (divmod(position, self.num_prompts) for position in range(first, first + count))
        return [int(self._order(epoch)[index]) for epoch, index in slots]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng(derive_seed(self._seed, "epoch", epoch)).permutation(self.num_prompts)


class WeightedFileStream:
    """Endless sequence of example indices from several weighted files, counted through all files. An epoch contains as
    many examples as the files have, and of each file its share of them, weight / sum of the weights, rounded to whole
    examples and shuffled together. The next epoch continues with the examples that were not reached."""

    def __init__(
        self, file_sizes: Sequence[int], file_weights: Sequence[float], seed: int, shuffle: bool, start: int = 0
    ):
        ends = np.cumsum(file_weights) / np.sum(file_weights) * sum(file_sizes)
        self._quota_ends = np.rint(ends).astype(int)
        self.quotas: list[int] = np.diff(self._quota_ends, prepend=0).tolist()
        """Number of examples of each file in an epoch."""
        self._slots = PromptStream(sum(file_sizes), seed, shuffle)
        self._sources = [
            PromptStream(size, derive_seed(seed, "source", number), shuffle) for number, size in enumerate(file_sizes)
        ]
        self._file_starts, self._start = np.cumsum([0, *file_sizes]), start

    @property
    def num_prompts(self) -> int:
        """Number of examples per epoch."""
        return self._slots.num_prompts

    def prompt_indices(self, start: int, count: int) -> list[int]:
        """Return the indices of `count` examples, beginning with position `start`, as PromptStream does."""
        return [self._example_index(position - self._start) for position in range(start, start + count)]

    def _example_index(self, position: int) -> int:
        (slot,) = self._slots.prompt_indices(position, 1)
        source = int(np.searchsorted(self._quota_ends, slot, side="right"))
        epoch, quota = position // self.num_prompts, self.quotas[source]
        first_slot = int(self._quota_ends[source]) - quota
        source_position = epoch * quota + slot - first_slot
        return int(self._file_starts[source]) + self._sources[source].prompt_indices(source_position, 1)[0]
