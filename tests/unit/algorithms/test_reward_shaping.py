"""Rewards by hand. The golden vectors have the KL penalty and the overlong filter."""

import torch

from alphaapollo.algorithms.reward_shaping import soft_overlong_punishment


def test_soft_overlong_punishment_has_a_floor():
    lengths = torch.tensor([10, 16, 18, 20, 99])
    assert soft_overlong_punishment(lengths, max_length=20, cache=4).tolist() == [0, 0, -0.5, -1.0, -1.0]
    assert soft_overlong_punishment(lengths, 20, 4, factor=0.5).tolist() == [0, 0, -0.25, -0.5, -0.5]
