import math

import pytest
import torch

from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.algorithms.policy_losses.ppo import binary_kl, binary_tv, is_dropped
from alphaapollo.config.schema import Actor


def probabilities(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64).log()


def evaluate(name: str, pi: torch.Tensor, mu: torch.Tensor, signs: list[float], actor: Actor | None = None):
    """Loss, gradient and metrics of one row of tokens."""
    logp = pi.clone().requires_grad_()
    batch = PolicyLossInputs(logp, mu, torch.tensor([signs], dtype=torch.float64), torch.ones_like(mu))
    output = get_policy_loss(name)(batch, actor or Actor())
    output.loss.sum().backward()
    return output.loss[0].tolist(), logp.grad[0].tolist(), {key: one.item() for key, one in output.metrics.items()}


def test_divergences_by_hand():
    pi, mu = probabilities(0.5, 0.8), probabilities(0.25, 0.8)
    assert binary_tv(pi, mu)[0].tolist() == pytest.approx([0.25, 0.0])
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert binary_kl(pi, mu)[0].tolist() == pytest.approx([kl, 0.0])


@pytest.mark.parametrize(
    ("pi", "mu", "expected"),
    [
        (0.0, math.log(0.5), math.inf),  # "any other token" has become impossible
        (0.0, 0.0, 0.0),
        (math.log(0.5), 0.0, math.log(2.0)),
        (0.0, 1e-7, -0.0),  # the engine's log-prob can exceed 0 by a rounding error
        (-90.0, -1e-3, 89.9),
    ],
)
def test_binary_kl_at_the_ends(pi: float, mu: float, expected: float):
    kl = binary_kl(torch.tensor(pi, dtype=torch.float64), torch.tensor(mu, dtype=torch.float64))
    assert kl.item() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_rare_token_is_kept_and_a_frequent_one_is_dropped():
    """Section 4.2 of the paper: 1e-4 -> 1e-2 is a ratio of 100 and 0.99 -> 0.80 one of 0.81."""
    loss, gradient, metrics = evaluate("dppo_tv", probabilities(1e-2, 0.78), probabilities(1e-4, 0.99), [1.0, -1.0])
    assert loss == pytest.approx([-100.0, 0.0])
    assert gradient == pytest.approx([-100.0, 0.0])
    assert (metrics["pg_clipfrac"], metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (1.0, 1.0, 0.0)


def test_tokens_that_return_to_the_engine_policy_are_kept():
    pi, mu = probabilities(0.9, 0.1, 0.9, 0.1), probabilities(0.3, 0.6, 0.3, 0.6)
    loss, _, metrics = evaluate("dppo_tv", pi, mu, [1.0, 1.0, -1.0, -1.0])
    assert loss == pytest.approx([0.0, -1 / 6, 3.0, 0.0])
    assert metrics["pg_clipfrac"] == 2.0


def test_bounds_are_strict_and_separate():
    d, divergence = torch.tensor([0.1, 0.1, -0.1, -0.1]), torch.tensor([0.2, 0.3, 0.1, 0.2])
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert is_dropped(d, divergence, signs, low=0.1, high=0.2).tolist() == [False, True, False, True]
    assert not is_dropped(d, divergence, 0.0 * signs, low=0.0, high=0.0).any()  # A = 0


def test_the_cap_is_a_constant_weight():
    actor = Actor(clip_ratio=1.0, clip_ratio_c=5.0)
    loss, gradient, _ = evaluate("dppo_tv", probabilities(0.8, 0.2), probabilities(0.1, 0.1), [1.0, -2.0], actor)
    assert loss == pytest.approx([-5.0, 4.0])
    assert gradient == pytest.approx([-5.0, 4.0])


@pytest.mark.parametrize(("name", "default"), [("dppo_tv", 0.2), ("dppo_kl", 0.05)])
def test_default_bounds(name: str, default: float):
    pi, mu, signs = probabilities(0.4, 0.55, 0.3, 0.1), probabilities(0.3, 0.3, 0.35, 0.35), [1.0, 1.0, -1.0, -1.0]
    assert evaluate(name, pi, mu, signs) == evaluate(name, pi, mu, signs, Actor(clip_ratio=default))
    assert evaluate(name, pi, mu, signs)[0] == pytest.approx([-4 / 3, 0.0, 6 / 7, 0.0])
