"""Registered estimators: contexts, named rewards, errors, inputs. tests/plugins/verify has their values."""

import math

import pytest
import torch

from alphaapollo.algorithms.adaptive_coefficients import next_baseline
from alphaapollo.algorithms.advantages import AdvantageInputs, estimator_names, get_estimator
from alphaapollo.config.schema import Algorithm
from tests.unit.algorithms.batches import make_advantage_inputs, make_complete_inputs

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)


def batch(scores: list[float], **fields: object) -> AdvantageInputs:
    """Four rows of two groups, one row per trajectory, with the outcome on the last action token."""
    return make_advantage_inputs(scores, **{"groups": [0, 0, 1, 1], "mask": MASK} | fields)


def estimate(name: str, scores: list[float], config: Algorithm | None = None, **fields: object) -> list[float]:
    """Value of each row, which is equal on its action tokens and zero elsewhere."""
    advantages = get_estimator(name)(batch(scores, **fields), config or Algorithm()).advantages
    values = [row[mask.bool()].unique() for row, mask in zip(advantages, MASK, strict=True)]
    assert all(len(value) == 1 for value in values)
    assert not advantages[~MASK.bool()].any()
    return [value.item() for value in values]


def components(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(own, dtype=torch.float64) for name, own in values.items()}


COMPONENTS = components(accuracy=[1.0, 0.0, 1.0, 1.0], format=[0.0, 0.0, 0.0, 5.0])
TASK = components(task=[1.0, 0.0, 1.0, 1.0])
SHORT = components(accuracy=[1.0, 0.0, 1.0, 1.0], short=[1.0, 1.0, 1.0, 0.0])
INCOMPLETE = components(accuracy=[1.0, 0.0, 1.0, 1.0], format=[1.0, math.nan, 0.0, 0.0])


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


ON_FORMAT = {"gdpo_rewards": ["accuracy"], "gdpo_conditions": {"accuracy": ("format", 1.0)}}


@pytest.mark.parametrize(
    ("name", "options", "scores", "given", "said"),
    [
        ("gdpo", {"gdpo_rewards": ["speed"]}, [0] * 4, COMPONENTS, r"must return speed, but .*\[accuracy, format\]"),
        ("gdpo", {"gdpo_conditions": {"speed": ("accuracy", 1.0)}}, [0] * 4, COMPONENTS, "must return speed, but"),
        ("gdpo", {"gdpo_conditions": {"format": ("speed", 1.0)}}, [0] * 4, COMPONENTS, "must return speed, but"),
        ("gdpo", ON_FORMAT, [0] * 4, INCOMPLETE, r"\[format\] are missing or not finite"),
        ("gdpo", {}, [0] * 4, INCOMPLETE, r"\[format\] are missing or not finite"),
        ("gdpo", {}, [0] * 4, {}, r"named rewards, but .*\[\]"),
        ("grpo_passk_analytic", {"passk_k": 2}, [1, 0.5, 0, 0], None, r"rewards of 0 or 1, but got 0\.5"),
        ("grpo", {}, [0, 0, math.nan, 0], None, "rewards of 1 samples are NaN or infinite"),
        ("grpo", {}, [0, 0, math.inf, 0], None, "rewards of 1 samples are NaN or infinite"),
    ],
)
def test_bad_rewards(name: str, options: dict, scores: list[float], given: dict | None, said: str):
    with pytest.raises(ValueError, match=said):
        get_estimator(name)(batch(scores, components=given), Algorithm(**options))


def test_passk_analytic_of_a_group_that_lost_samples():
    advantages = estimate("grpo_passk_analytic", [1, 0, 0, 0], Algorithm(passk_k=2), groups=[0, 0, 0, 1])
    assert advantages[0] > 0 and advantages[3] == 0, "smaller than k"


@pytest.mark.parametrize("name", estimator_names())
def test_fully_masked_rows_give_nothing_and_no_nan(name: str):
    one_empty = MASK * torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    for mask, empty in ((one_empty, [1]), (torch.zeros_like(MASK), [0, 1, 2, 3])):
        inputs = make_complete_inputs([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], mask)
        advantages = get_estimator(name)(inputs, Algorithm(passk_k=2)).advantages
        assert advantages.isfinite().all() and not advantages[empty].any()


def test_the_moving_baseline_starts_with_the_first_mean():
    config = Algorithm(baseline_decay=0.75)
    first = next_baseline(config, None, 2.0)
    assert first == 2.0 and next_baseline(config, first, 6.0) == 3.0
    assert next_baseline(Algorithm(), None, 2.0) is None
