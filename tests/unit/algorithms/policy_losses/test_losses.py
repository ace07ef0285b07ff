"""Registered policy losses: metrics, selected tokens and limits. tests/plugins/verify has their values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.algorithms.policy_losses.ppo import binary_kl, is_dropped
from alphaapollo.config.schema import Actor
from tests.unit.algorithms.batches import with_choice

Pair = tuple[list[float], list[float]]
"""Log-probs of a row of tokens, and the old ones."""


def ratios(*values: float) -> Pair:
    return [math.log(value) - 1.0 for value in values], [-1.0] * len(values)


def probabilities(policy: list[float], engine: list[float]) -> Pair:
    return [math.log(p) for p in policy], [math.log(p) for p in engine]


def make_batch(tokens: Pair, advantages: list[float]) -> PolicyLossInputs:
    """The row, with a masked token before the others, and an empty row. Masked tokens have NaN as log-prob."""
    policy, old = ([[math.nan, *row], [math.nan] * (len(row) + 1)] for row in tokens)
    logp = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    matrix = torch.tensor([[0.0, *advantages], [0.0] * (len(advantages) + 1)], dtype=torch.float64)
    mask = torch.tensor([[0] + [1] * len(advantages), [0] * (len(advantages) + 1)], dtype=torch.float64)
    return PolicyLossInputs(logp, torch.tensor(old, dtype=torch.float64), matrix, mask)


def evaluate(name: str, batch: PolicyLossInputs, options: dict[str, Any]) -> tuple[list[float], list[float], dict]:
    """Loss of the tokens or of the row, gradient of its sum, and metrics. Masked tokens have neither."""
    loss, actor = get_policy_loss(name), Actor(**options)
    output = loss(with_choice(batch, loss, actor), actor)
    losses = output.loss + output.penalty
    inside = batch.mask > 0 if loss.level == "token" else batch.mask.amax(1) > 0
    losses[inside].sum().backward()
    assert not batch.logp.grad[batch.mask == 0].any()
    metrics = {key: value.item() for key, value in output.metrics.items()}
    return losses[inside].tolist(), batch.logp.grad[batch.mask > 0].tolist(), metrics


LOG2 = math.log(2)
UP = 0.25 * math.exp(1.5)  # VESPO: W^k exp(lambda (1 - W)) at W = 1/2
CLIP_HIGHER = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
PPO_KL = {"policy_loss": {"loss_mode": "ppo_kl", "ppo_kl_coef": 3.0}}
# log-probs 0, -1, -2, -1 beside A 2, 0, -2, 0: covariances 2, 0, 2, 0; both high ones are unclipped at ratio 1
CLIP_COV, KL_COV = {"clip_cov_ratio": 0.25}, {"kl_cov_ratio": 0.25, "ppo_kl_coef": 10.0}
COVARIED = [0.0, -1.0, -2.0, -1.0]


@pytest.mark.parametrize(
    ("name", "options", "tokens", "advantages", "metrics"),
    [
        # ratios above, inside and below the clip, both signs of A; metrics are sums over tokens
        ("ppo", {}, ratios(1.5, 1.1, 0.5), [2] * 3, {"pg_clipfrac": 1}),
        ("ppo", {}, ratios(1.5, 1.1, 0.5), [-2] * 3, {"pg_clipfrac": 1}),
        ("ppo", CLIP_HIGHER, ratios(9, 0.1), [-1, -1], {"pg_clipfrac": 1, "pg_clipfrac_lower": 1}),
        ("ppo", {}, ratios(1, 1), [1, 1], {"old_policy_kl": 0}),
        ("ppo", {}, ratios(2, 2), [1, 1], {"old_policy_kl": 2 * (1 - LOG2)}),
        # geometric mean sqrt(4 * 1) = 2
        ("gspo", {"clip_ratio": 0.2}, ratios(4, 1), [1, 1], {"pg_clipfrac": 1}),
        ("gspo", {"clip_ratio": 0.2}, ratios(4, 1), [-1, -1], {"pg_clipfrac": 0}),
        ("gspo", {}, ratios(2, 2), [1, 1], {"old_policy_kl": 1 - LOG2}),  # one row
        ("gmpo", {}, ratios(math.e, 1 / math.e), [1, 1], {"pg_clipfrac": 0.5}),
        ("gmpo", {}, ratios(math.e, 1 / math.e), [-1, -1], {"pg_clipfrac": 0.5}),
        ("vespo", {}, ratios(1, 0.5), [2, 2], {"vespo_weight": 2 * UP}),
        # section 4.2 of DPPO's paper: 1e-4 -> 1e-2 is a ratio of 100 and is kept, 0.99 -> 0.80 one of 0.81 and is not
        ("dppo_tv", {}, probabilities([1e-2], [1e-4]), [1], {"pg_clipfrac": 0}),
        ("dppo_tv", {}, probabilities([0.78], [0.99]), [-1], {"pg_clipfrac": 1, "clip_fraction_low": 1}),
        # tokens that return to the engine's policy are kept
        ("dppo_tv", {}, probabilities([0.9, 0.1], [0.3, 0.6]), [1, 1], {"pg_clipfrac": 1}),
        ("dppo_tv", {}, probabilities([0.9, 0.1], [0.3, 0.6]), [-1, -1], {"clip_fraction_high": 0}),
    ],
)
def test_metrics_by_hand(name: str, options: dict, tokens: Pair, advantages: list[float], metrics: dict):
    found = evaluate(name, make_batch(tokens, advantages), options)[2]
    assert {key: found[key] for key in metrics} == pytest.approx(metrics)


def test_a_given_coefficient_of_ppo_kl_replaces_that_of_the_config():
    batch = replace(make_batch(ratios(1.5), [2.0]), kl_coef=0.5)
    loss, gradient, metrics = evaluate("ppo_kl", batch, PPO_KL)
    assert loss == pytest.approx([-3.0 + 0.5 * (0.5 - math.log(1.5))])
    assert gradient == pytest.approx([-3.0 + 0.5 * 0.5]) and metrics["policy_kl_coef"] == 0.5


def test_covariances_select_a_share_of_the_tokens():
    tokens = (COVARIED, [value - LOG2 for value in COVARIED])
    loss, gradient, metrics = evaluate("kl_cov", make_batch(tokens, [3, 0, -1, 0]), {"policy_loss": KL_COV})
    assert loss == pytest.approx([-6.0 + 10.0 * LOG2, 0.0, 2.0, 0.0])
    assert gradient == pytest.approx([-6.0 + 10.0, 0.0, 2.0, 0.0]) and metrics["kl_cov_fraction"] == 1.0
    _, _, metrics = evaluate("clip_cov", make_batch((COVARIED, COVARIED), [2, 0, -2, 0]), {"policy_loss": CLIP_COV})
    assert metrics["clip_cov_fraction"] == 1.0


@pytest.mark.parametrize("name", policy_loss_names())
def test_no_nan_where_everything_is_masked_or_extreme(name: str):
    masked = make_batch(ratios(2.0), [1.0])
    masked = replace(masked, logp=torch.full_like(masked.logp, math.nan).requires_grad_(), mask=0 * masked.mask)
    _, _, metrics = evaluate(name, masked, {})
    assert all(map(math.isfinite, metrics.values()))
    logp = torch.tensor([[-0.0, -800.0]] * 2, requires_grad=True)
    extreme = PolicyLossInputs(logp, logp.detach().flip(1), torch.tensor([[1.0] * 2, [-1.0] * 2]), torch.ones(2, 2))
    loss, gradient, metrics = evaluate(name, extreme, {})
    assert all(map(math.isfinite, [*loss, *gradient, *metrics.values()]))


@pytest.mark.parametrize(
    ("pi", "mu", "expected"),
    [
        (0.0, math.log(0.5), math.inf),  # "any other token" has become impossible
        (0.0, 0.0, 0.0),
        (math.log(0.5), 0.0, LOG2),
        (0.0, 1e-7, -0.0),  # the engine's log-prob can exceed 0 by a rounding error
        (-90.0, -1e-3, 89.9),
    ],
)
def test_binary_kl_at_the_ends(pi: float, mu: float, expected: float):
    kl = binary_kl(torch.tensor(pi, dtype=torch.float64), torch.tensor(mu, dtype=torch.float64))
    assert kl.item() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_bounds_of_dppo_are_strict_and_separate():
    d, divergence = torch.tensor([0.1, 0.1, -0.1, -0.1]), torch.tensor([0.2, 0.3, 0.1, 0.2])
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert is_dropped(d, divergence, signs, low=0.1, high=0.2).tolist() == [False, True, False, True]
    assert not is_dropped(d, divergence, 0.0 * signs, low=0.0, high=0.0).any()  # A = 0
