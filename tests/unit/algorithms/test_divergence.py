"""Limits of the divergences, and their sampled form on average. The golden vectors have values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from alphaapollo.algorithms.kl import REVERSE, compute_target_advantages, distribution_overlap


def random_pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 6, generator=generator).double(), torch.randn(4, 6, generator=generator).double()


def test_the_sampled_form_is_the_reverse_kl_on_average():
    """Sum over tokens v of p_v times what a sample v gives: value, overlap, and -A grad log p."""
    logits, other = random_pair()
    p, q = logits[:1].log_softmax(-1), other[:1].log_softmax(-1)
    size = p.shape[-1]
    old, teacher, mask = p.view(size, 1), q.view(size, 1), torch.ones(size, 1)
    advantages = compute_target_advantages(old, teacher, mask).advantages[:, 0]
    weights = p.exp()[0]
    each = [compute_target_advantages(old[v : v + 1], teacher[v : v + 1], mask[:1]) for v in range(size)]
    for name, exact in (("reverse_kl", REVERSE.value(p, q)), ("agreement", distribution_overlap(p, q))):
        mean = sum(w * getattr(one, name) for w, one in zip(weights, each, strict=True))
        assert mean == pytest.approx(exact.item())
    of_logp = torch.eye(size, dtype=torch.float64) - weights  # [v, u]: d log p_v / dz_u
    expected = (weights * -advantages) @ of_logp
    torch.testing.assert_close(expected, REVERSE.gradient(p, q)[0])


def test_values_outside_the_mask_are_ignored():
    old = torch.tensor([[-1.0, -2.0, float("nan")]]).double()
    teacher = torch.tensor([[-0.5, -3.0, 0.0]]).double()
    taught = compute_target_advantages(old, teacher, torch.tensor([[1.0, 1.0, 0.0]]))
    assert taught.advantages.tolist() == [[0.5, -1.0, 0.0]]
    assert taught.reverse_kl == pytest.approx(0.25)
    assert taught.agreement == pytest.approx((1 + math.exp(-1)) / 2)
