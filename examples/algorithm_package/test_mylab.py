"""Tests of the package: `pytest test_mylab.py` after `pip install -e .`."""

from __future__ import annotations

import torch

from alphaapollo.config.schema import Actor
from alphaapollo.testing import check_estimator, check_policy_loss, make_estimator_inputs, make_loss_inputs


def test_the_best_and_the_worst_answer_are_equally_far_from_the_middle() -> None:
    inputs, result = make_estimator_inputs(seed=1), check_estimator("midrange", seed=1)
    for group in range(3):
        advantages = result.advantages[inputs.group_ids == group]
        assert advantages.max() == -advantages.min()


def test_a_small_clip_ratio_is_a_large_penalty() -> None:
    inputs = make_loss_inputs()
    small, large = (check_policy_loss("squared", Actor(clip_ratio=ratio)) for ratio in (0.1, 0.2))
    square = (inputs.log_ratio.exp() - 1).square()
    assert torch.allclose((small - large) * inputs.mask, square * (5 - 2.5) * inputs.mask)
