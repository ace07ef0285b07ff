"""Turn-level GAE, group baselines per turn, and GiGPO.

The two-turn bandit: in turn 1, action 0 ends the episode. Its expected gradients are computed by enumeration.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, Turns, get_estimator
from alphaapollo.config.schema import Algorithm
from tests.golden.turn_functions import list_episodes, turn_bandit
from tests.unit.algorithms.batches import per_turn

APPEND, MEMORY = "append", "memory"
LOGITS = torch.tensor([[0.2, -0.4, 0.1], [0.5, -0.3, 0.0]], dtype=torch.float64)
REWARDS = torch.tensor([[0.3, 0.1, 0.0], [1.0, 0.2, 0.6]], dtype=torch.float64)
STOP = torch.tensor([[1, 0, 0], [1, 1, 1]])
EXACT = [[-0.107422, 0.054479, 0.052943], [0.084394, -0.065667, -0.018727]]


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


@pytest.mark.parametrize("context", [APPEND, MEMORY])
def test_turn_gae(context: str):
    batch = batch_of([[0.0, 1.0], [-1.0]], context, values=[[0.2, 0.4], [0.5]])
    result = get_estimator("turn_gae")(batch, Algorithm(gamma=0.5, lam=0.5, whiten_advantages=False))
    # the deltas are 0.5 * 0.4 - 0.2 = 0 and 1 - 0.4 = 0.6, so the first advantage is 0.25 * 0.6
    assert per_turn(batch, result.advantages) == pytest.approx([0.15, 0.6, -1.5])
    assert per_turn(batch, result.returns) == pytest.approx([0.35, 1.0, -1.0])


def test_with_one_token_per_turn_turn_gae_is_gae():
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(4, 9, generator=generator) < 0.6).double()
    rewards, values = (torch.randn(4, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    index = torch.full((4, 9), -1)
    index[mask.bool()] = torch.arange(int(mask.sum()))
    owners = mask.nonzero()[:, 0]
    turns = Turns(index, owners, torch.arange(len(owners)))
    inputs = AdvantageInputs(rewards, mask, torch.zeros(4), torch.arange(4), torch.arange(4), values, turns=turns)
    algorithm = Algorithm(gamma=0.9, lam=0.7)
    token, turn = (get_estimator(name)(inputs, algorithm) for name in ("gae", "turn_gae"))
    assert torch.allclose(token.advantages, turn.advantages) and torch.allclose(token.returns, turn.returns)


THREE = [[0.0, 1.0], [-0.5, 0.0, 0.0], [0.0]]  # with gamma = 0.5 the returns are 0.5, 1 | -0.5, 0, 0 | 0
A, B = 1, 2
STATES = [A, B, A, A, B, A]  # A -> B -> goal, A -> A -> B, A -> C
# episodes 1, -0.5, 0: mean 1/6, squares about it 25/36 + 16/36 + 1/36 = 7/6, over 2
EPISODE = [5 / 6, 5 / 6, -2 / 3, -2 / 3, -2 / 3, -1 / 6]
TURN = [0.5, 0.5, -0.5, 0.0, -0.5, 0.0]  # from A: 0.5, -0.5, 0, 0: mean 0; from B: 1, 0: mean 0.5
STD_OF_TURN = [math.sqrt(x) for x in (0.5 / 3, 0.5, 0.5 / 3, 0.5 / 3, 0.5, 0.5 / 3)]
NORMALIZED = [e / math.sqrt(7 / 12) + t / s for e, t, s in zip(EPISODE, TURN, STD_OF_TURN, strict=True)]
NOT_NORMALIZED = {"norm_adv_by_std_in_grpo": False, "gigpo_step_weight": 2.0}


@pytest.mark.parametrize("context", [APPEND, MEMORY])
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("turn_group", {"turn_baseline": "return_all"}, [0.75, 1.0, -0.75, -0.5, 0.0, 0.0]),
        ("turn_group", {"turn_baseline": "return_alive"}, [0.75, 1.0, -0.75, -1.0, 0.0, 0.0]),
        ("gigpo", NOT_NORMALIZED, [e + 2 * t for e, t in zip(EPISODE, TURN, strict=True)]),
        ("gigpo", {}, NORMALIZED),
    ],
)
def test_baselines_by_hand(context: str, name: str, options: dict, expected: list[float]):
    batch = batch_of(THREE, context, anchors=STATES)
    result = get_estimator(name)(batch, Algorithm(gamma=0.5, **options))
    assert per_turn(batch, result.returns) == [0.5, 1.0, -0.5, 0.0, 0.0, 0.0]
    assert per_turn(batch, result.advantages) == pytest.approx(expected, rel=1e-5)


def test_gigpo_with_a_weight_of_zero_or_states_that_occur_once_is_grpo():
    for anchors, weight in ((STATES, 0.0), (None, 1.0)):
        batch = batch_of(THREE, MEMORY, anchors=anchors)
        gigpo = get_estimator("gigpo")(batch, Algorithm(gigpo_step_weight=weight))
        assert torch.equal(gigpo.advantages, get_estimator("grpo")(batch, Algorithm()).advantages)


def test_a_turn_that_no_other_trajectory_reaches_keeps_its_return():
    batch = batch_of([[0.0, 0.5, 2.0], [1.0, 0.5]], APPEND)
    for baseline in ("return_all", "return_alive"):
        result = get_estimator("turn_group")(batch, Algorithm(turn_baseline=baseline))
        assert per_turn(batch, result.advantages) == [1.0, 2.0, 2.0, -1.0, -2.0]


@pytest.mark.parametrize("baseline", ["return_all", "return_alive"])
def test_a_group_of_one_and_a_group_of_equal_rewards_have_no_advantage(baseline: str):
    batch = batch_of([[0.5, 2.0], [0.1, 0.7], [0.1, 0.7], [0.1, 0.7]], APPEND, groups=[0, 1, 1, 1])
    assert not get_estimator("turn_group")(batch, Algorithm(turn_baseline=baseline)).advantages.any()


@pytest.mark.parametrize("context", [APPEND, MEMORY])
@pytest.mark.parametrize("baseline", ["return_all", "return_alive"])
def test_expected_gradient_of_the_bandit_is_exact(context: str, baseline: str):
    """Each of the 343 groups of three of the seven episodes, weighted by its probability."""
    episodes = list(list_episodes(LOGITS, REWARDS, STOP))
    chosen = [one for group in itertools.product(episodes, repeat=3) for one in group]
    groups = [number // 3 for number in range(len(chosen))]
    batch = batch_of([one.rewards[one.is_turn.bool()].tolist() for one in chosen], context, groups=groups)
    result = get_estimator("turn_group")(batch, Algorithm(turn_baseline=baseline))
    advantages = iter(per_turn(batch, result.advantages))
    gradient = torch.zeros(2, 3, dtype=torch.float64)
    for start in range(0, len(chosen), 3):
        group = chosen[start : start + 3]
        weight = group[0].probability * group[1].probability * group[2].probability / 3
        for one in group:
            for turn in range(int(one.is_turn.sum())):
                gradient[turn] += weight * next(advantages) * one.scores[turn]
    assert torch.allclose(gradient, torch.tensor(EXACT, dtype=torch.float64), atol=1e-6)


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
