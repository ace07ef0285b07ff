"""Which prompt comes when: a pure function of (seed, epoch, index), so a position is one number, which a run's
Progress saves (trainer/progress.py, finetuning/sft.py)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from alphaapollo.seeds import derive_seed


def choose_rows(total: int, count: int, seed: int, shuffle: bool) -> list[int]:
    """`count` of `total` rows, in their order: drawn by the seed, or the first ones; all where there are no more, or
    where count is -1 or 0."""
    if not 0 < count < total:
        return list(range(total))
    if not shuffle:
        return list(range(count))
    drawn = np.random.default_rng(derive_seed(seed, "max_samples")).choice(total, size=count, replace=False)
    return sorted(int(row) for row in drawn)


class PromptStream:
    """Endless order over `num_prompts` prompts: epoch after epoch, each shuffled anew (or in file order).

    Example: with 3 prompts and no shuffle, `indices(start=2, count=3)` is `[2, 0, 1]`.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool):
        assert num_prompts > 0
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def indices(self, start: int, count: int) -> list[int]:
        """The prompts number start .. start + count - 1 since the beginning of training.

        A stretch that crosses an epoch can hold a prompt twice.
        """
        places = (divmod(position, self.num_prompts) for position in range(start, start + count))
        return [int(self._order(epoch)[index]) for epoch, index in places]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng(derive_seed(self._seed, "epoch", epoch)).permutation(self.num_prompts)
