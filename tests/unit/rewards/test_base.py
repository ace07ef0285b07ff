import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from alphaapollo.rewards.base import convert_to_score
from alphaapollo.types import Outcome, Score


@pytest.mark.parametrize("number", [1, 1.0, True, np.float32(1), np.array(1.0), np.array([1.0]), np.int64(1)])
def test_any_single_number_is_a_reward(number):
    assert convert_to_score(number) == Score(1.0)
    assert type(convert_to_score(number).reward) is float


FAILED = Score(0.5, outcome=Outcome.GRADER_FAILED, reason="the judge is away")
WRONG_FORMAT = Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no number")


RESULTS = [
    ({"reward": 0.7, "accuracy": 1, "format": 0}, Score(0.7, {"accuracy": 1.0, "format": 0.0})),
    ({"accuracy": 1.0, "format": 0.5}, Score(1.5, {"accuracy": 1.0, "format": 0.5})),  # summed
    ({"reward": 0.7, "format": 0}, Score(0.7, {"format": 0.0})),  # .7 is no accuracy
    (WRONG_FORMAT, WRONG_FORMAT),
    (FAILED, replace(FAILED, reward=pytest.approx(math.nan, nan_ok=True))),
]


@pytest.mark.parametrize(("result", "score"), RESULTS)
def test_dicts_and_scores(result, score):
    found = convert_to_score(result)
    assert (found, found.accuracy) == (score, score.accuracy)


REJECTED = [
    (None, "the reward is a NoneType"),
    ("1.0", "the reward is a str"),
    ([1.0, 0.0], "the reward is a list of length 2"),
    (np.array([1.0, 2.0]), "the reward is a ndarray of length 2"),
    ({"accuracy": "high"}, "component 'accuracy' is a str"),
    ({}, "empty dict"),
    (math.nan, "the reward is nan"),
    (-1e30, r"-1e\+30.* from -1e\+09 to 1e\+09"),
    (10**400, "the reward is 1000"),
    ({"accuracy": math.nan}, "component 'accuracy' is nan"),
    ({"reward": math.nan, "accuracy": 1}, "the reward is nan"),
    (SimpleNamespace(item=lambda: "x"), "the reward is a str"),
]


@pytest.mark.parametrize(("result", "what"), REJECTED)
def test_other_results_are_rejected_with_a_reason(result, what):
    with pytest.raises((TypeError, ValueError), match=what):
        convert_to_score(result)
