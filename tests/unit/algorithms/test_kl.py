import math

import pytest
import torch

from alphaapollo.algorithms.adaptive_coefficients import next_kl_coef, next_policy_kl_coef
from alphaapollo.algorithms.kl import kl_penalty, unbiased_kl
from alphaapollo.algorithms.policy_losses.ppo import old_policy_penalty
from alphaapollo.config.schema import KLControl, PolicyLossOptions
from tests.unit.plain import kl_full


def test_k3_overflow_is_guarded_in_float32():
    logp, ref_logp = torch.tensor([-300.0]), torch.tensor([-1.0])
    assert kl_penalty(logp, ref_logp, "k3").isfinite().all()
    assert kl_penalty(ref_logp, logp, "k3").tolist() == [298.0]  # large d needs no guard


def test_expectations_by_exact_enumeration():
    """E[k1] = E[k3] = KL. E[grad k1] = 0, E[grad k2] = grad KL(pi||ref), E[grad k3] = grad KL(ref||pi). k3+ has the
    value of the one and the gradient of the other."""
    generator = torch.Generator().manual_seed(1)
    logits, ref_logits = torch.randn(2, 6, generator=generator, dtype=torch.float64).unbind(0)
    logits.requires_grad_()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    logp, ref_logp = logits.log_softmax(0), ref_logits.log_softmax(0)
    p = logp.exp().detach()
    kl = kl_full(logits, ref_logits)
    reverse = kl_full(ref_logits, logits)
    expected = {kind: (p * kl_penalty(logp, ref_logp, kind)).sum() for kind in ("k1", "k2", "k3", "k3+")}
    for kind in ("k1", "k3", "k3+"):
        torch.testing.assert_close(expected[kind], kl)
    assert abs(expected["k2"] - kl) > 1e-3
    torch.testing.assert_close(gradient(expected["k1"]), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(gradient(expected["k2"]), gradient(kl))
    torch.testing.assert_close(gradient(expected["k3"]), gradient(reverse))
    torch.testing.assert_close(gradient(expected["k3+"]), gradient(kl))


@pytest.mark.parametrize("logp", [-15.0, -19.0, -25.0])
def test_the_gradient_of_unbiased_kl_is_small_and_exact_in_float32(logp: float):
    """The policy has almost abandoned a token of the reference. k3's gradient is up to -exp(20) there."""
    d = logp + 1.0
    logp = torch.tensor([[logp]], requires_grad=True)
    engine, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.0]])
    unbiased_kl(logp, engine, ref, torch.ones(1, 1)).backward()
    assert logp.grad.item() == pytest.approx(d * math.exp(max(d, -20.0)))


CONTROL = {"kl_coef": 0.5, "target_kl": 6.0, "horizon": 1000.0}


@pytest.mark.parametrize(
    ("kind", "coef", "kl", "expected"),
    [
        ("fixed", 0.3, 99.0, 0.5),  # the config decides, not the coefficient of the checkpoint
        ("adaptive", 0.2, 6.6, 0.2 * 1.01),  # error 0.1, 100 sequences
        ("adaptive", 0.2, 600.0, 0.2 * 1.02),  # clipped to 0.2
        ("doubling", 1.0, 9.0, 1.0),  # the thresholds are strict
        ("doubling", 1.0, 4.0, 1.0),
        ("doubling", 1.0, 9.1, 2.0),
        ("doubling", 2.0, 3.9, 1.0),
        ("doubling", 0.5 / 2**10, 3.9, 0.5 / 2**10),  # the floor
        ("dual", 0.05, 11.0, 0.10),
        ("dual", 0.15, -94.0, 0.0),  # projected: a negative multiplier would reward divergence
    ],
)
def test_next_kl_coef(kind: str, coef: float, kl: float, expected: float):
    assert next_kl_coef(KLControl(type=kind, **CONTROL), coef, kl, 100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "coef", "kl", "expected"),
    [
        ("doubling", None, 0.1, 4.0),  # above 1.5 targets; the initial coefficient is 2
        ("doubling", 8.0, 0.01, 4.0),
        ("doubling", 1e-12, 0.0, 2.0 / 2**10),
        ("doubling", 8.0, 0.02, 8.0),
        ("dual", 8.0, 0.12, 8.5),  # 8 + 5 (0.12 - 0.02)
        ("dual", 0.05, 0.0, 0.0),
    ],
)
def test_next_policy_kl_coef(kind: str, coef: float | None, kl: float, expected: float):
    options = PolicyLossOptions(ppo_kl_coef=2.0, ppo_kl_type=kind, ppo_kl_target=0.02, ppo_kl_rate=5.0)
    assert next_policy_kl_coef(options, coef, kl) == pytest.approx(expected)


def test_penalty_of_ppo_kl_has_value_and_gradient_of_the_kl_to_the_old_policy():
    """In expectation over tokens of the old policy, summed over a vocabulary of five."""
    torch.manual_seed(0)
    logits, old = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    p, q = logits.log_softmax(-1), old.log_softmax(-1)
    estimate, exact = (q.exp() * old_policy_penalty(p - q)).sum(), (q.exp() * (q - p)).sum()
    (found,), (expected,) = (torch.autograd.grad(one, logits, retain_graph=True) for one in (estimate, exact))
    assert estimate.item() == pytest.approx(exact.item())
    torch.testing.assert_close(found, expected)
