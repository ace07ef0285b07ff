import math

import pytest
import torch

from alphaapollo.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    Turns,
    estimator_names,
    get_estimator,
    register_estimator,
)
from alphaapollo.algorithms.advantages.gae import next_baseline, reinforce_pp_baseline
from alphaapollo.algorithms.advantages.grpo import grpo, magistral, passk_leave_one_out, rloo
from alphaapollo.algorithms.statistics import Groups, center_in_groups
from alphaapollo.config.schema import Algorithm
from tests.unit.algorithms.batches import make_advantage_inputs

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)


def batch(scores: list[float], mask: torch.Tensor = MASK, **more: object) -> AdvantageInputs:
    """Four rows of two groups, one row per trajectory, with the outcome on the last action token."""
    return make_advantage_inputs(scores, **{"groups": [0, 0, 1, 1], "mask": mask} | more)


def one_turn_a_row(mask: torch.Tensor, groups: torch.Tensor, owners: torch.Tensor) -> Turns:
    """All turns of a group start from the same state."""
    index = torch.where(mask.bool(), torch.arange(len(mask)).unsqueeze(1), -1)
    return Turns(index, trajectory_ids=owners, anchor_ids=groups)


def per_row(advantages: torch.Tensor) -> list[float]:
    """Value of each row, which is equal on its action tokens and zero elsewhere."""
    values = [row[mask.bool()].unique() for row, mask in zip(advantages, MASK, strict=True)]
    assert all(len(value) == 1 for value in values)
    assert not advantages[~MASK.bool()].any()
    return [value.item() for value in values]


def estimate(name: str, scores: list[float], config: Algorithm | None = None, **more: object) -> list[float]:
    return per_row(get_estimator(name)(batch(scores, **more), config or Algorithm()).advantages)


@pytest.mark.parametrize(
    ("name", "options", "scores", "expected"),
    [
        ("grpo", {}, [1, 3, 5, 5], [-math.sqrt(0.5), math.sqrt(0.5), 0, 0]),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, [1, 3, 5, 5], [-1, 1, 0, 0]),
        ("dr_grpo", {}, [1, 3, 5, 6], [-1, 1, -0.5, 0.5]),
        ("rloo", {}, [1, 3, 5, 5], [-2, 2, 0, 0]),
        ("maxrl", {}, [1, 3, 5, 5], [-0.5, 0.5, 0, 0]),
        # lengths 2, 3: b = (2*1 + 3*3)/5 = 2.2; lengths 1, 1: b = 5.5
        ("opo", {}, [1, 3, 5, 6], [-1.2, 0.8, -0.5, 0.5]),
        ("gpg", {}, [1, 3, 5, 5], [-2, 2, 0, 0]),  # alpha = 4 / (4 - 2)
        ("gpg", {"norm_adv_by_std_in_grpo": True}, [1, 5, 5, 5], [-math.sqrt(2), math.sqrt(2), 0, 0]),
        # centred -1, 1, -3, 3: mean 0, var 20/3
        ("magistral", {}, [1, 3, 0, 6], [x / math.sqrt(20 / 3) for x in (-1, 1, -3, 3)]),
        ("reinforce_plus_plus_baseline", {}, [1, 3, 0, 6], [x / math.sqrt(20 / 3) for x in (-1, 1, -3, 3)]),
        ("grpo_passk", {}, [1, 3, 5, 5], [0, 2, 0, 0]),
        ("grpo_passk", {"norm_adv_by_std_in_grpo": True}, [1, 3, 5, 5], [0, math.sqrt(2), 0, 0]),
        ("grpo_passk_analytic", {"passk_k": 1}, [1, 0, 1, 1], [1, -1, 0, 0]),
        # k = N: one right sample makes the group right: no spread left
        ("grpo_passk_analytic", {"passk_k": 2}, [1, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_one_value_per_trajectory(name: str, options: dict, scores: list[float], expected: list[float]):
    assert estimate(name, scores, Algorithm(**options)) == pytest.approx(expected, abs=2e-6)


def test_ddof_and_eps():
    """Arguments that only the functions have: ddof and eps."""
    scores, groups = torch.tensor([1.0, 3, 5, 5], dtype=torch.float64), Groups.from_ids(torch.tensor([0, 0, 1, 1]))
    assert grpo(scores, groups, ddof=0, eps=0.0).tolist() == [-1, 1, 0, 0]
    assert grpo(scores, groups, ddof=0, eps=1.0).tolist() == [-0.5, 0.5, 0, 0]
    assert passk_leave_one_out(scores, groups, std_norm=True, ddof=0, eps=1.0).tolist() == [0, 1, 0, 0]
    assert rloo(torch.tensor([1.0, 3, 5]), Groups.from_ids(torch.tensor([0, 0, 1]))).tolist() == [-2, 2, 0]
    spread = torch.tensor([1.0, 3, 0, 6], dtype=torch.float64)
    expected = pytest.approx([x / math.sqrt(5.0) for x in (-1, 1, -3, 3)])
    assert magistral(center_in_groups(spread, groups), torch.zeros(4), ddof=0).tolist() == expected
    assert reinforce_pp_baseline(spread, groups, ddof=0, eps=0.0).tolist() == expected


def test_gae_by_hand():
    values = torch.tensor([[1.0, 2.0, 99.0], [0.0, 0.0, 0.0], [3.0, 99.0, 99.0], [99.0, 4.0, 99.0]])
    config = Algorithm(gamma=0.5, lam=0.5, whiten_advantages=False)
    result = get_estimator("gae")(batch([1, 4, 5, 5], values=values.double()), config)
    # row 0: A_1 = 1 - 2 = -1; A_0 = 0 + .5*2 - 1 + .25*(-1) = -.25. row 1: 4, then 0 + .25*4, then .25*1
    expected = [[-0.25, -1.0, 0], [0.25, 1.0, 4.0], [2.0, 0, 0], [0, 1.0, 0]]
    assert result.advantages.tolist() == expected
    assert result.returns.tolist() == [[0.75, 1.0, 0], [0.25, 1.0, 4.0], [5.0, 0, 0], [0, 5.0, 0]]


def test_gae_whitens_over_action_tokens():
    result = get_estimator("gae")(batch([1, 4, 5, 6], values=torch.zeros(4, 3, dtype=torch.float64)), Algorithm())
    on_actions = result.advantages[MASK.bool()]
    assert on_actions.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert on_actions.std().item() == pytest.approx(1.0)
    assert not result.advantages[~MASK.bool()].any()
    assert result.returns[MASK.bool()].tolist() == [1, 1, 4, 4, 4, 5, 6]  # the critic's targets are not whitened


def two_turns(memory: bool, **more: object) -> AdvantageInputs:
    """One group: a trajectory with two turns (2 tokens and 1) and reward 1, and one with one token and reward 0."""
    if memory:
        rewards, mask, values = [[0, 0], [1, 0], [0, 0]], [[1, 1], [1, 0], [1, 0]], [[0.1, 0.2], [0.4, 9], [0.3, 9]]
        owners = [0, 0, 1]
    else:  # two tokens of the environment between the turns
        rewards, mask = [[0, 0, 0, 0, 1], [0] * 5], [[1, 1, 0, 0, 1], [1, 0, 0, 0, 0]]
        values, owners = [[0.1, 0.2, 9, 9, 0.4], [0.3, 9, 9, 9, 9]], [0, 1]
    own = torch.tensor(owners)
    return make_advantage_inputs(
        torch.tensor([1.0, 0.0])[own],
        torch.zeros_like(own),
        torch.tensor(mask, dtype=torch.float64),
        token_rewards=torch.tensor(rewards, dtype=torch.float64),
        trajectory_ids=own,
        values=torch.tensor(values, dtype=torch.float64),
        greedy_rewards=torch.full((len(owners),), 0.5, dtype=torch.float64),
        baseline=0.25,
    )


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # gamma = lambda = 1: the return 1 of each token less its value
        ("gae", {"whiten_advantages": False}, [0.9, 0.8, 0.6, -0.3]),
        # deltas .5 x .2 - .1 = 0, .5 x .4 - .2 = 0, 1 - .4 = .6; the trace is .25
        ("gae", {"whiten_advantages": False, "gamma": 0.5, "lam": 0.5}, [0.0375, 0.15, 0.6, -0.3]),
        ("reinforce", {}, [1.0, 1.0, 1.0, 0.0]),
        ("reinforce", {"gamma": 0.5}, [0.25, 0.5, 1.0, 0.0]),
        ("reinforce", {"gamma": 0.5, "baseline_decay": 0.9}, [0.0, 0.25, 0.75, -0.25]),
        ("remax", {}, [0.5, 0.5, 0.5, -0.5]),
        ("remax", {"gamma": 0.5}, [-0.25, 0.0, 0.5, -0.5]),
        # returns 1, 1, 1, 0: mean 3/4, var 1/4
        ("reinforce_plus_plus", {}, [0.5, 0.5, 0.5, -1.5]),
    ],
)
@pytest.mark.parametrize("memory", [False, True])
def test_credit_runs_across_the_turns_of_a_trajectory(name: str, options: dict, expected: list[float], memory: bool):
    inputs = two_turns(memory)
    advantages = get_estimator(name)(inputs, Algorithm(**options)).advantages
    assert advantages[inputs.mask.bool()].tolist() == pytest.approx(expected)


def test_magistral_normalises_each_mini_batch_by_itself():
    # centred -1, 1 in the first and -3, 3 in the second: std sqrt(2) and sqrt(18)
    numbers = {"mini_batches": torch.tensor([0, 0, 1, 1])}
    assert estimate("magistral", [1, 3, 0, 6], **numbers) == pytest.approx([x / math.sqrt(2) for x in (-1, 1, -1, 1)])


def components(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(own, dtype=torch.float64) for name, own in values.items()}


COMPONENTS = components(accuracy=[1.0, 0.0, 1.0, 1.0], format=[0.0, 0.0, 0.0, 5.0])
TASK = components(task=[1.0, 0.0, 1.0, 1.0])
SHORT = components(accuracy=[1.0, 0.0, 1.0, 1.0], short=[1.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("options", "given", "summed"),
    [
        ({}, COMPONENTS, [1, -1, -1, 1]),
        ({}, COMPONENTS | TASK, [1, -1, -1, 1]),  # by default, accuracy is not used if it equals task
        ({"gdpo_rewards": ["accuracy"]}, COMPONENTS, [1, -1, 0, 0]),
        ({"gdpo_rewards": ["accuracy", "task"]}, COMPONENTS | TASK, [2, -2, 0, 0]),  # as named
        ({"gdpo_rewards": ["format", "accuracy"], "gdpo_weights": [3.0, 1.0]}, COMPONENTS, [1, -1, -3, 3]),
        ({}, SHORT, [1, -1, 1, -1]),
        ({"gdpo_conditions": {"short": ("accuracy", 1.0)}}, SHORT, [2, -2, 1, -1]),  # 1, 0, 1, 0 is left of short
        ({"gdpo_conditions": {"short": ("accuracy", 1.1)}}, SHORT, [1, -1, 0, 0]),  # nothing is
        # both conditions use the rewards as given, not what the other condition left
        ({"gdpo_conditions": {"short": ("accuracy", 1.0), "accuracy": ("short", 1.0)}}, SHORT, [2, -2, 2, -2]),
    ],
)
def test_gdpo_normalises_each_reward_then_the_batch(options: dict, given: dict, summed: list[float]):
    std = math.sqrt(sum(x * x for x in summed) / 3)
    expected = pytest.approx([x / std for x in summed], rel=1e-3)  # epsilon 1e-4
    assert estimate("gdpo", [0, 0, 0, 0], Algorithm(**options), components=given) == expected


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({"gdpo_rewards": ["speed"]}, COMPONENTS, r"must return speed, but .*\[accuracy, format\]"),
        ({"gdpo_conditions": {"speed": ("accuracy", 1.0)}}, COMPONENTS, "must return speed, but"),
        ({"gdpo_conditions": {"format": ("speed", 1.0)}}, COMPONENTS, "must return speed, but"),
        (
            {"gdpo_rewards": ["accuracy"], "gdpo_conditions": {"accuracy": ("format", 1.0)}},
            COMPONENTS | {"format": torch.tensor([1.0, math.nan, 0.0, 0.0])},
            r"\[format\] are missing or not finite",
        ),
        ({}, {}, r"named rewards, but .*\[\]"),
        ({}, {"format": torch.tensor([1.0, math.nan, 0.0, 0.0])}, r"\[format\] are missing or not finite"),
    ],
)
def test_gdpo_bad_components(options: dict, given: dict, said: str):
    with pytest.raises(ValueError, match=said):
        get_estimator("gdpo")(batch([0, 0, 0, 0], components=given), Algorithm(**options))


def test_passk_analytic_by_hand():
    # N = 4, one right, k = 2: all fail with C(3,2)/C(4,2) = 1/2, s = 1/2; a wrong sample's partners fail with 2/3
    inputs = batch([1, 0, 0, 0], groups=[0, 0, 0, 0])
    advantages = get_estimator("grpo_passk_analytic")(inputs, Algorithm(passk_k=2)).advantages
    assert per_row(advantages) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_passk_analytic_bad_inputs():
    estimator = get_estimator("grpo_passk_analytic")
    with pytest.raises(ValueError, match=r"rewards of 0 or 1, but got 0\.5"):
        estimator(batch([1, 0.5, 0, 0]), Algorithm(passk_k=2))
    lost_samples = batch([1, 0, 1, 0], groups=[0, 0, 0, 1])  # not an error
    assert not estimator(lost_samples, Algorithm(passk_k=2)).advantages[3].any()


GROUP_ESTIMATORS = [name for name in estimator_names() if get_estimator(name).group]


def full_batch(scores: list[float], **more: object) -> AdvantageInputs:
    return batch(
        scores,
        values=torch.zeros(4, 3, dtype=torch.float64),
        greedy_rewards=torch.zeros(4, dtype=torch.float64),
        components={"accuracy": torch.tensor(scores, dtype=torch.float64)},
        turns=one_turn_a_row(more.get("mask", MASK), torch.tensor([0, 0, 1, 1]), torch.arange(4)),
        **more,
    )


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_groups_get_exactly_zero(name: str):
    result = get_estimator(name)(full_batch([1.0, 1.0, 0.0, 0.0]), Algorithm(passk_k=2))
    assert not result.advantages.any()


@pytest.mark.parametrize("name", ["magistral", "reinforce_plus_plus_baseline", "gdpo"])
@pytest.mark.parametrize("third", [0.1, 0.3, 0.7])
def test_group_with_equal_rewards_has_zero_advantage_among_others(name: str, third: float):
    """0.1, 0.2 and `third` minus their mean do not add up to exactly 0."""
    scores = torch.tensor([0.5, 0.5, 0.1, 0.2, third], dtype=torch.float64)
    inputs = make_advantage_inputs(scores, [0, 0, 1, 1, 1], components={"accuracy": scores})
    advantages = get_estimator(name)(inputs, Algorithm()).advantages
    assert advantages[:2].tolist() == [[0.0], [0.0]]
    assert advantages[2:].all()


@pytest.mark.parametrize("name", estimator_names())
def test_fully_masked_rows_give_nothing_and_no_nan(name: str):
    mask = MASK.clone()
    mask[1] = 0
    result = get_estimator(name)(full_batch([1.0, 0.0, 1.0, 0.0], mask=mask), Algorithm(passk_k=2))
    assert result.advantages.isfinite().all()
    assert not result.advantages[1].any()
    nothing = get_estimator(name)(full_batch([1.0, 0.0, 1.0, 0.0], mask=torch.zeros_like(MASK)), Algorithm(passk_k=2))
    assert not nothing.advantages.any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_statistics_count_trajectories_not_rows(name: str):
    """A trajectory with three rows has the same weight as one with a single row and the same tokens."""
    scores = [1.0, 0.0, 0.0, 1.0]

    def inputs(mask: list[list[int]], owners: list[int]) -> AdvantageInputs:
        own = torch.tensor(owners)
        per_row_scores = torch.tensor(scores, dtype=torch.float64)[own]
        matrix, groups = torch.tensor(mask, dtype=torch.float64), torch.tensor([0, 0, 0, 1])[own]
        fields = {"components": {"accuracy": per_row_scores}, "turns": one_turn_a_row(matrix, groups, own)}
        fields |= {"token_rewards": torch.zeros_like(matrix), "trajectory_ids": own + 100}
        return make_advantage_inputs(per_row_scores, groups, matrix, **fields)

    config = Algorithm(passk_k=1)
    one = get_estimator(name)(inputs([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]], [0, 1, 2, 3]), config)
    split = get_estimator(name)(
        inputs([[1, 0, 0], [0, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]], [0, 0, 1, 2, 3, 3]), config
    )
    assert split.advantages[0, 0] == split.advantages[1, 1] == one.advantages[0, 0]
    assert split.advantages[2, 0] == one.advantages[1, 0]


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("gae", "values"),
        ("remax", "greedy_rewards"),
        ("gdpo", "components"),
        ("gigpo", "turns"),
        ("magistral", "mini_batches"),
    ],
)
def test_what_an_estimator_needs(name: str, need: str):
    assert get_estimator(name).needs == (need,)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_non_finite_rewards_are_an_error(reward: float):
    with pytest.raises(ValueError, match="rewards of 1 samples are NaN or infinite"):
        get_estimator("grpo")(batch([0, 0, reward, 0]), Algorithm())


def test_unknown_estimators_suggest_similar_names():
    with pytest.raises(ValueError, match=r"'gpro'.*'grpo'"):
        get_estimator("gpro")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.zeros(4, 2), r"of shape \(4, 3\), but got .*\(4, 2\)"),
        (torch.ones(4, 3), "outside the action mask"),
        (torch.full((4, 3), math.nan), "must be finite"),
    ],
)
def test_what_an_estimator_returns_is_checked(result: torch.Tensor, said: str):
    name = f"bad {said}"
    register_estimator(name)(lambda inputs, config: Advantages(result, result))
    with pytest.raises(ValueError, match=said):
        get_estimator(name)(batch([0, 0, 0, 0]), Algorithm())


def test_the_moving_baseline_starts_with_the_first_mean():
    config = Algorithm(baseline_decay=0.75)
    first = next_baseline(config, None, 2.0)
    assert first == 2.0 and next_baseline(config, first, 6.0) == 3.0
    assert next_baseline(Algorithm(), None, 2.0) is None
