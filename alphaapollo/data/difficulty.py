"""Choice of training prompts by difficulty: pass rates, weights, and random draws in proportion to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from alphaapollo.utils.seeds import derive_seed

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
    that are `taken`, or drawn by an earlier position, are drawn only if no other prompt has a weight above 0. The
    random numbers depend only on seed and position."""
    drawn, excluded, cumulative = [], set(taken), np.cumsum(weights)
    for position in positions:
        rng = np.random.default_rng(derive_seed(seed, "sampler", position))
        index = _draw_index(cumulative, rng.random())
        if index in excluded:
            free_weights = weights.copy()
            free_weights[list(excluded)] = 0.0
            index = _draw_index(np.cumsum(free_weights) if free_weights.any() else cumulative, rng.random())
        excluded.add(index)
        drawn.append(index)
    return drawn


def _draw_index(cumulative: np.ndarray, uniform: float) -> int:
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
