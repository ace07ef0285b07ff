import numpy as np
import torch

from alphaapollo.algorithms.kl import subtract_kl
from alphaapollo.algorithms.reward_shaping import add_outcome_reward, overlong_filter, soft_overlong_punishment


def test_outcome_is_added_to_the_last_action_token():
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 0, 0, 0], dtype=np.uint8)
    placed = np.zeros(10)
    add_outcome_reward(placed, np.array([1.0, 2.0, 3.0]), mask, np.array([0, 4, 8, 10]))
    assert placed.tolist() == [0, 1.0, 0, 0, 0, 0, 2.0, 0, 0, 0]
    add_outcome_reward(placed, np.array([5.0, 7.0]), mask, np.array([0, 8, 10]))  # the first has two rows
    assert placed.tolist() == [0, 1.0, 0, 0, 0, 0, 7.0, 0, 0, 0]


def test_kl_in_reward_by_hand():
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    old = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -9.0, -9.0], [-9.0, -9.0, -9.0]])
    ref = torch.tensor([[-2.0, -5.0, 0.0], [-3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    flat = (matrix.flatten() for matrix in (rewards, old, ref, mask))
    shaped = subtract_kl(*flat, torch.tensor([3, 3, 3]), coef=0.1)
    torch.testing.assert_close(
        shaped.token_rewards.view(3, 3), torch.tensor([[-0.1, 0.7, 0.0], [1.8, 0.0, 0.0], [0.0, 0.0, 0.0]])
    )
    assert shaped.kl_per_sequence == 3.0  # (1 + 3) and 2, over two non-empty rows
    assert shaped.kl_per_token == 2.0  # means 2 and 2


def test_soft_overlong_punishment_has_a_floor():
    lengths = torch.tensor([10, 16, 18, 20, 99])
    assert soft_overlong_punishment(lengths, max_length=20, cache=4).tolist() == [0, 0, -0.5, -1.0, -1.0]
    assert soft_overlong_punishment(lengths, 20, 4, factor=0.5).tolist() == [0, 0, -0.25, -0.5, -0.5]


def test_overlong_filter():
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert overlong_filter(mask, torch.tensor([True, False])).tolist() == [[0.0, 0.0], [1.0, 0.0]]
