from __future__ import annotations

import math

import numpy as np
import pytest

from alphaapollo.algorithms.mismatch import mismatch_metrics, sum_mismatch


def figures_of(trainer: np.ndarray, engine: np.ndarray, mask: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """Mismatch metrics over the action tokens of response-aligned matrices [B, L]."""
    rows, positions = np.nonzero(mask)
    return mismatch_metrics([sum_mismatch(trainer[rows, positions], engine[rows, positions], ids[rows], positions)])


def test_equal_log_probs() -> None:
    logp = np.full((2, 3), -1.5, dtype=np.float32)
    figures = figures_of(logp, logp, np.array([[1, 1, 1], [1, 0, 0]]), np.arange(2))
    zeros, ones = ("k1", "k3", "abs", "k3_at_0"), ("rho_p01", "rho_p50", "rho_p99", "ess", "ess_sequence")
    assert figures == {f"mismatch/{name}": 0.0 for name in zeros} | {f"mismatch/{name}": 1.0 for name in ones}


def test_figures_by_hand() -> None:
    """Two tokens with ratios 2 and 1/2, and a masked token with an arbitrary value."""
    trainer = np.array([[math.log(2), -math.log(2), 99.0]])
    figures = figures_of(trainer, np.zeros((1, 3)), np.array([[1, 1, 0]]), np.array([0]))
    assert figures["mismatch/k1"] == pytest.approx(0.0)
    assert figures["mismatch/k3"] == pytest.approx((2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2)
    assert figures["mismatch/abs"] == pytest.approx(math.log(2))
    assert figures["mismatch/rho_p50"] == pytest.approx(1.0)
    assert figures["mismatch/ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert figures["mismatch/ess_sequence"] == pytest.approx(1.0)  # one row, its product is 1


def test_a_sequence_is_a_trajectory_not_a_row() -> None:
    """Three rows of products 2, 1/2 and 1: of two trajectories the first has both of the former."""
    gap = np.array([[math.log(2)], [-math.log(2)], [0.0]])
    args = gap, np.zeros((3, 1)), np.ones((3, 1))
    assert figures_of(*args, np.array([0, 0, 1]))["mismatch/ess_sequence"] == pytest.approx(1.0)
    alone = figures_of(*args, np.arange(3))["mismatch/ess_sequence"]
    assert alone == pytest.approx(3.5**2 / (3 * 5.25))


def test_k3_estimates_the_kl_of_engine_from_trainer() -> None:
    """By enumeration over the engine's distribution."""
    engine, trainer = np.array([0.2, 0.3, 0.5]), np.array([0.25, 0.25, 0.5])
    tokens = np.repeat([0, 1, 2], [2, 3, 5])
    figures = figures_of(np.log(trainer)[tokens][None], np.log(engine)[tokens][None], np.ones((1, 10)), np.array([0]))
    kl = float((engine * np.log(engine / trainer)).sum())
    assert figures["mismatch/k1"] == pytest.approx(kl)
    assert figures["mismatch/k3"] == pytest.approx(kl)


def test_by_position() -> None:
    gap = np.zeros((1, 80))
    gap[0, 70] = math.log(2)
    figures = figures_of(gap, np.zeros((1, 80)), np.ones((1, 80)), np.array([0]))
    assert figures["mismatch/k3_at_0"] == figures["mismatch/k3_at_16"] == 0.0
    assert figures["mismatch/k3_at_64"] == pytest.approx((2 - 1 - math.log(2)) / 16)
    assert "mismatch/k3_at_256" not in figures


def test_nothing_to_measure() -> None:
    assert figures_of(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)), np.arange(2)) == {}
