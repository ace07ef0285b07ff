"""Turn-level GAE, group baselines per turn, and GiGPO."""

import itertools
from dataclasses import replace

import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, Turns, get_estimator
from alphaapollo.config.schema import Algorithm
from tests.golden.functions import turn_bandit
from tests.unit.algorithms.batches import per_turn

APPEND, MEMORY = "append", "memory"


def batch_of(
    rewards: list[list[float]],
    context: str,
    values: list[list[float]] | None = None,
    groups: list[int] | None = None,
    anchors: list[int] | None = None,
) -> AdvantageInputs:
    """Trajectories with turns of two tokens. The reward of a turn, on the observation after it in append context, and
    the value at its first token are given; the value at its second token is 9. anchors: states that turns start from.
    """
    width = max(map(len, rewards))
    if context == APPEND:  # two turns without an observation between them are adjacent
        token_rewards, index = torch.zeros(len(rewards), 3 * width).double(), torch.full((len(rewards), 3 * width), -1)
        cells = [(row, 3 * turn) for row, given in enumerate(rewards) for turn in range(len(given))]
        owners = torch.arange(len(rewards))
    else:
        total = sum(map(len, rewards))
        token_rewards, index = torch.zeros(total, 3).double(), torch.full((total, 3), -1)
        cells = [(row, 0) for row in range(total)]
        owners = torch.tensor([row for row, given in enumerate(rewards) for _ in given])
    predicted = torch.full_like(token_rewards, 9.0)
    flat_values = [value for row in values or [] for value in row]
    for number, ((row, column), reward) in enumerate(zip(cells, itertools.chain(*rewards), strict=True)):
        index[row, column : column + 2] = number
        token_rewards[row, column + 2] = reward
        if values:
            predicted[row, column] = flat_values[number]
    scores = torch.tensor([sum(given) for given in rewards], dtype=torch.float64)[owners]
    group_ids = torch.tensor(groups or [0] * len(rewards))[owners]
    trajectory_ids = torch.tensor([row for row, given in enumerate(rewards) for _ in given])
    turns = Turns(index, trajectory_ids, torch.tensor(anchors or range(len(trajectory_ids))))
    return AdvantageInputs(token_rewards, (index >= 0).double(), scores, group_ids, owners, predicted, turns=turns)


@pytest.mark.parametrize("name", ["turn_gae", "turn_group", "gigpo"])
def test_contexts_have_equal_advantages(name: str):
    """The reference of `alphaapollo verify` has them in append context (test_reference_and_algorithms.py)."""
    rewards, found = [[0.0, 1.0], [-0.5, 0.0, 0.0], [0.0]], []
    for context in (APPEND, MEMORY):
        batch = batch_of(rewards, context, values=[[0.2, 0.4], [0.5, 0.1, 0.3], [0.6]], anchors=[1, 2, 1, 1, 2, 1])
        result = get_estimator(name)(batch, Algorithm(gamma=0.5, lam=0.5))
        found.append([*per_turn(batch, result.advantages), *per_turn(batch, result.returns)])
    assert found[0] == pytest.approx(found[1])


def test_a_turn_that_no_other_trajectory_reaches_keeps_its_return():
    batch = batch_of([[0.0, 0.5, 2.0], [1.0, 0.5]], APPEND)
    for baseline in ("return_all", "return_alive"):
        result = get_estimator("turn_group")(batch, Algorithm(turn_baseline=baseline))
        assert per_turn(batch, result.advantages) == [1.0, 2.0, 2.0, -1.0, -2.0]


@pytest.mark.parametrize("baseline", ["return_all", "return_alive"])
def test_a_group_of_one_and_a_group_of_equal_rewards_have_no_advantage(baseline: str):
    batch = batch_of([[0.5, 2.0], [0.1, 0.7], [0.1, 0.7], [0.1, 0.7]], APPEND, groups=[0, 1, 1, 1])
    assert not get_estimator("turn_group")(batch, Algorithm(turn_baseline=baseline)).advantages.any()


def test_rewards_before_and_between_turns_belong_to_a_turn():
    batch = batch_of([[0.0, 0.0]], APPEND)
    assert batch.turns is not None
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]], dtype=torch.float64)
    assert batch.turns.sum_rewards(rewards).tolist() == [7.0, 56.0]
    late = replace(batch.turns, turn_of_token=torch.tensor([[-1, 0, -1, 1, -1, -1]]))
    assert late.sum_rewards(rewards).tolist() == [7.0, 56.0]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([[1.0, 0.0]] * 4, {"trajectory": 1.962, "return_all": 0.940, "return_alive": 1.120}),
        ([[0.0, 1.0]] * 3 + [[1.0, 0.0]], {"trajectory": 0.118, "return_all": 0.212, "return_alive": 0.170}),
        ([[0.0, 1.0]] * 3 + [[1.0, 1.0]], {"trajectory": 0.0, "return_all": 0.199, "return_alive": 0.070}),
    ],
)
def test_variance_of_the_gradient(rewards: list[list[float]], expected: dict[str, float]):
    """The numbers of docs/algorithms/turns.md: four turns, two actions, of which the second ends the episode; groups of
    six. The gradient is summed over the group."""
    stop = torch.tensor([[0, 1]] * 3 + [[1, 1]])
    for method, variance in expected.items():
        result = turn_bandit(torch.zeros(4, 2).double(), torch.tensor(rewards).double(), stop, 6, method)
        assert result["bias"].abs().max() < 1e-12
        assert 6 * result["variance"].item() == pytest.approx(variance, abs=5e-4)
