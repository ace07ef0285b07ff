"""Samples of known distributions: right ones are near 0, planted faults are far from it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from alphaapollo.algorithms.surprise import compute_z, sum_repetitions, sum_surprises

NUM_CONTEXTS, NUM_TOKENS, LENGTH, TEMPERATURE = 50, 40, 32, 0.7
LOGITS = np.random.default_rng(0).normal(0, 2, (NUM_CONTEXTS, NUM_TOKENS))  # the context is the last token
Sums = tuple[np.ndarray, np.ndarray]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def truncate(logp: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-logp, axis=-1)
    before = np.cumsum(np.exp(np.take_along_axis(logp, order, -1)), -1) - np.exp(np.take_along_axis(logp, order, -1))
    kept = np.zeros_like(logp, dtype=bool)
    np.put_along_axis(kept, order, before < top_p, -1)
    return log_softmax(np.where(kept, logp, -1e9))


def sample_groups(
    seed: int, sampled: np.ndarray, scale: float = 1.0, equal: bool = False, mismatch: float = 0.0
) -> Sums:
    """Sums of 16 groups of 8 samples, of which short ones end at token 0. sampled: log-probs [contexts, tokens]."""
    rng, scored = np.random.default_rng(seed), log_softmax(scale * LOGITS / TEMPERATURE)
    entropy = -(np.exp(scored) * scored).sum(-1)
    variance = (np.exp(scored) * scored**2).sum(-1) - entropy**2
    surprises, repetitions = np.zeros(4), np.zeros(4)
    for _ in range(16):
        group, start = [], int(rng.integers(NUM_TOKENS))
        for _ in range(8):
            contexts, tokens = [], [start]
            while len(contexts) < LENGTH and (tokens[-1] or not contexts):
                contexts.append(tokens[-1])
                tokens.append(int((np.log(rng.exponential(size=NUM_TOKENS)) - sampled[tokens[-1]]).argmin()))
            group.append((contexts, tokens[1:]))
        group = [group[0]] * 8 if equal else group
        for contexts, ids in group:
            logp = scored[contexts, ids]
            engine = logp + mismatch * rng.normal(size=len(ids))
            surprises += sum_surprises(np.stack([logp, entropy[contexts], variance[contexts]], 1), engine)
        repetitions += sum_repetitions([(ids, scored[contexts, ids]) for contexts, ids in group])
    return surprises, repetitions


RIGHT = log_softmax(LOGITS / TEMPERATURE)


def test_right_samples_are_near_zero() -> None:
    runs = [sample_groups(seed, RIGHT) for seed in range(20)]
    found = np.array([[compute_z(sums) for sums in run] for run in runs])
    assert np.abs(found).max() < 3.5 and (found.std(0) > 0.5).all() and (found.std(0) < 1.6).all()
    assert max(abs(compute_z(sum(sums))) for sums in zip(*runs, strict=True)) < 3.5


FAULTS: dict[str, Callable[[int], Sums]] = {
    "temperature squared": lambda seed: sample_groups(seed, log_softmax(LOGITS / TEMPERATURE**2)),
    "temperature 1": lambda seed: sample_groups(seed, log_softmax(LOGITS)),
    "top-p": lambda seed: sample_groups(seed, truncate(RIGHT, 0.9)),
    "other weights": lambda seed: sample_groups(seed, log_softmax((LOGITS + np.roll(LOGITS, 1, 0) / 4) / TEMPERATURE)),
    "one seed for a group": lambda seed: sample_groups(seed, RIGHT, equal=True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_far_from_zero(name: str) -> None:
    found = np.array([[compute_z(sums) for sums in FAULTS[name](seed)] for seed in range(3)])
    assert (np.abs(found[:, int(name == "one seed for a group")]) > 5).all(), found


def test_a_policy_without_entropy_is_near_zero() -> None:
    """Rare tokens occur seldom or once: neither their absence nor their occurrence is an alarm."""
    for scale in (4.0, 8.0, 16.0):
        sharp = log_softmax(scale * LOGITS / TEMPERATURE)
        assert max(abs(compute_z(sums)) for seed in range(5) for sums in sample_groups(seed, sharp, scale)) < 3.5


def test_mismatch_explains_a_drift_of_its_size() -> None:
    flatter = log_softmax(LOGITS / (TEMPERATURE * 1.06))
    assert (
        abs(compute_z(sample_groups(0, flatter)[0])) > 2 and compute_z(sample_groups(0, flatter, mismatch=0.2)[0]) == 0
    )
