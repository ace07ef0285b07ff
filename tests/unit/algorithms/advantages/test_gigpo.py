"""A group of three trajectories on the way from A: A -> B -> goal, A -> A -> B, A -> C.

The turns start from A, B | A, A, B | A; the first trajectory earns 1 on its last token, the second costs 0.5 in its
first turn. With gamma = 0.5 the returns are 0.5, 1 | -0.5, 0, 0 | 0.
"""

import math
from dataclasses import replace

import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, Turns, get_estimator
from alphaapollo.config.schema import Algorithm
from tests.unit.algorithms.batches import make_advantage_inputs, per_turn

IDS = torch.tensor([0, 0, 1, 1, 1, 2])
A, B = 0, 1
ANCHORS = torch.tensor([A, B, A, A, B, A])


def append_rows() -> AdvantageInputs:
    """One row per trajectory: turns of two tokens, with one environment token between them."""
    index = torch.tensor([[0, 0, -1, 1, 1, -1, -1, -1], [2, 2, -1, 3, 3, -1, 4, 4], [5, 5, -1, -1, -1, -1, -1, -1]])
    rewards = torch.zeros(3, 8, dtype=torch.float64)
    rewards[0, 4], rewards[1, 1] = 1.0, -0.5
    return inputs(rewards, index, torch.tensor([0, 1, 2]))


def memory_rows() -> AdvantageInputs:
    """One row per turn."""
    rewards = torch.zeros(6, 2, dtype=torch.float64)
    rewards[1, 1], rewards[2, 1] = 1.0, -0.5
    return inputs(rewards, torch.arange(6).unsqueeze(1).repeat(1, 2), IDS)


def inputs(rewards: torch.Tensor, index: torch.Tensor, owners: torch.Tensor) -> AdvantageInputs:
    scores = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)[owners]
    fields = {"token_rewards": rewards, "trajectory_ids": owners, "turns": Turns(index, IDS, ANCHORS)}
    return make_advantage_inputs(scores, torch.zeros_like(owners), (index >= 0).double(), **fields)


@pytest.mark.parametrize("batch", [append_rows(), memory_rows()])
def test_without_deviations(batch):
    config = Algorithm(gamma=0.5, norm_adv_by_std_in_grpo=False, gigpo_step_weight=2.0)
    result = get_estimator("gigpo")(batch, config)
    # episodes 1, -0.5, 0: mean 1/6. From A: 0.5, -0.5, 0, 0: mean 0. From B: 1, 0: mean 0.5.
    episode = [5 / 6, 5 / 6, -2 / 3, -2 / 3, -2 / 3, -1 / 6]
    turn = [0.5, 0.5, -0.5, 0.0, -0.5, 0.0]
    assert per_turn(batch, result.advantages) == pytest.approx([e + 2 * t for e, t in zip(episode, turn, strict=True)])
    assert per_turn(batch, result.returns) == [0.5, 1.0, -0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("batch", [append_rows(), memory_rows()])
def test_with_deviations(batch):
    result = get_estimator("gigpo")(batch, Algorithm(gamma=0.5))
    # squares about 1/6: 25/36 + 16/36 + 1/36 = 7/6, over 2. From A: 0.5, over 3. From B: 0.5, over 1.
    of_episode, of_a, of_b = math.sqrt(7 / 12), math.sqrt(1 / 6), math.sqrt(1 / 2)
    episode = [x / of_episode for x in (5 / 6, 5 / 6, -2 / 3, -2 / 3, -2 / 3, -1 / 6)]
    turn = [0.5 / of_a, 0.5 / of_b, -0.5 / of_a, 0.0, -0.5 / of_b, 0.0]
    expected = [e + t for e, t in zip(episode, turn, strict=True)]
    assert per_turn(batch, result.advantages) == pytest.approx(expected, rel=1e-5)


def test_a_weight_of_zero_or_states_that_occur_once_are_grpo():
    batch = memory_rows()
    once = replace(batch, turns=Turns(batch.turns.turn_of_token, IDS, torch.arange(6)))
    for inputs, weight in ((append_rows(), 0.0), (once, 1.0)):
        gigpo = get_estimator("gigpo")(inputs, Algorithm(gigpo_step_weight=weight))
        assert torch.equal(gigpo.advantages, get_estimator("grpo")(inputs, Algorithm()).advantages)
