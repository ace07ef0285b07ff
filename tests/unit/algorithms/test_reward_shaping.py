"""Rewards by hand. The golden vectors have the KL penalty and the overlong filter."""

import numpy as np
import torch

from alphaapollo.algorithms.reward_shaping import add_outcome_reward, soft_overlong_punishment


def test_outcome_is_added_to_the_last_action_token():
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 0, 0, 0], dtype=np.uint8)
    placed = np.zeros(10)
    add_outcome_reward(placed, np.array([1.0, 2.0, 3.0]), mask, np.array([0, 4, 8, 10]))
    assert placed.tolist() == [0, 1.0, 0, 0, 0, 0, 2.0, 0, 0, 0]
    add_outcome_reward(placed, np.array([5.0, 7.0]), mask, np.array([0, 8, 10]))  # the first has two rows
    assert placed.tolist() == [0, 1.0, 0, 0, 0, 0, 7.0, 0, 0, 0]


def test_soft_overlong_punishment_has_a_floor():
    lengths = torch.tensor([10, 16, 18, 20, 99])
    assert soft_overlong_punishment(lengths, max_length=20, cache=4).tolist() == [0, 0, -0.5, -1.0, -1.0]
    assert soft_overlong_punishment(lengths, 20, 4, factor=0.5).tolist() == [0, 0, -0.25, -0.5, -0.5]
