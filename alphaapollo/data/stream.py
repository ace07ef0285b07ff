"""Endless order of training prompts, a pure function of the seed and the position.

A checkpoint only saves the position, i.e. the number of prompts used so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from alphaapollo.utils.seeds import derive_seed

R = TypeVar("R")


def choose_rows(rows: Sequence[R], max_rows: int, seed: int, shuffle: bool) -> list[R]:
    """Choose max_rows rows (0, -1: all) in their order: random rows if shuffle is True, else the first rows."""
    if not shuffle or not 0 < max_rows < len(rows):
        return list(rows[:max_rows] if max_rows > 0 else rows)
    drawn = np.random.default_rng(derive_seed(seed, "max_samples")).choice(len(rows), size=max_rows, replace=False)
    return [rows[index] for index in sorted(drawn)]


class PromptStream:
    """Endless sequence of prompt indices, shuffled differently in each epoch, or in file order if shuffle is False. Its
    first epoch begins at position `start` of the training run, after which the data has changed; usually 0."""

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, start: int = 0):
        assert num_prompts > 0
        self.num_prompts, self._start = num_prompts, start
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def prompt_indices(self, start: int, count: int) -> list[int]:
        """Return the indices of `count` prompts, beginning with the one at position `start` of the training run."""
        start -= self._start
        slots = (divmod(position, self.num_prompts) for position in range(start, start + count))
        return [int(self._order(epoch)[index]) for epoch, index in slots]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng(derive_seed(self._seed, "epoch", epoch)).permutation(self.num_prompts)


class WeightedFileStream:
    """Endless sequence of example indices from several weighted files, counted through all files. An epoch contains
    round(size * weight) examples of each file, shuffled together. With a weight below 1, the next epoch continues with
    the examples that the previous epoch did not reach."""

    def __init__(
        self, file_sizes: Sequence[int], file_weights: Sequence[float], seed: int, shuffle: bool, start: int = 0
    ):
        self._quotas = [max(1, round(size * weight)) for size, weight in zip(file_sizes, file_weights, strict=True)]
        self._slots = PromptStream(sum(self._quotas), seed, shuffle)
        self._sources = [
            PromptStream(size, derive_seed(seed, "source", number), shuffle) for number, size in enumerate(file_sizes)
        ]
        self._ends = np.cumsum(self._quotas)
        self._firsts, self._start = np.cumsum([0, *file_sizes]), start

    @property
    def num_prompts(self) -> int:
        """Number of examples per epoch."""
        return self._slots.num_prompts

    def prompt_indices(self, start: int, count: int) -> list[int]:
        """Return the indices of `count` examples, beginning with position `start`, as PromptStream does."""
        return [self._example_index(position - self._start) for position in range(start, start + count)]

    def _example_index(self, position: int) -> int:
        (slot,) = self._slots.prompt_indices(position, 1)
        source = int(np.searchsorted(self._ends, slot, side="right"))
        quota = self._quotas[source]
        source_position = position // self.num_prompts * quota + slot - (int(self._ends[source]) - quota)
        return int(self._firsts[source]) + self._sources[source].prompt_indices(source_position, 1)[0]


POOLS = ((0.25, 0.2), (0.75, 1.0), (1.0, 0.2))
"""(highest pass rate, weight) of the pools hard, normal and easy: the defaults of prime-rl."""


def decay_pass_rate(rate: float, observed: float, decay: float) -> float:
    """Return the new pass rate: decay * rate + (1 - decay) * observed; `observed` if the prompt was never sampled."""
    return observed if np.isnan(rate) else decay * rate + (1 - decay) * observed


def frontier_weights(rates: np.ndarray, target: float, lowest: float) -> np.ndarray:
    """Compute weights that fall with the distance of the pass rate r from the target t, 0 < t < 1. [N] -> [N].

    max(lowest, (r / t)^(2t) * ((1 - r) / (1 - t))^(2 - 2t)), which is 1 at r = t. With t = 1/2, this is 4 r (1 - r):
    the variance of the reward, relative to its maximum. Prompts that were never sampled have weight 1.
    """
    kernel = (rates / target) ** (2 * target) * ((1 - rates) / (1 - target)) ** (2 - 2 * target)
    return np.where(np.isnan(rates), 1.0, np.maximum(kernel, lowest))


def difficulty_weights(rates: np.ndarray) -> np.ndarray:
    """Return the weight of each prompt's pool (POOLS); 1 for prompts that were never sampled. [N] -> [N]."""
    highest, weights = zip(*POOLS, strict=True)
    return np.array([*weights, 1.0])[np.searchsorted(highest, rates)]  # NaN is sorted last


def draw_prompts(weights: np.ndarray, positions: Sequence[int], seed: int, taken: Collection[int]) -> list[int]:
    """Draw the index of a prompt for each position of the run, with probability proportional to its weight [N]. Prompts
    that are `taken`, or drawn by an earlier position, are drawn only if no other has a weight above 0. The random
    numbers depend on seed and position alone."""
    drawn, cumulative = [], np.cumsum(weights)
    excluded = set(taken)
    for position in positions:
        rng = np.random.default_rng(derive_seed(seed, "sampler", position))
        index = _draw_index(cumulative, rng.random())
        if index in excluded:
            free = weights.copy()
            free[list(excluded)] = 0.0
            index = _draw_index(np.cumsum(free) if free.any() else cumulative, rng.random())
        excluded.add(index)
        drawn.append(index)
    return drawn


def _draw_index(cumulative: np.ndarray, uniform: float) -> int:
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
