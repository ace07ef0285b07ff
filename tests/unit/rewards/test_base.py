import math
from types import SimpleNamespace

import numpy as np
import pytest

from alphaapollo.rewards.base import to_score
from alphaapollo.rewards.registry import check_gradable, find_grader, load_grader
from alphaapollo.types import Outcome, Prompt, Score


@pytest.mark.parametrize(
    ("data_source", "grader"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("HuggingFaceH4/aime_2024", "math"),
        ("math", "math"),
        ("exact", "exact"),
        ("ChilleD/SVAMP", "gsm8k"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "math"),
        ("rajpurkar/squad_v2", "search"),
        ("search_f1/mine", "search_f1"),
        ("cais/mmlu", "multiple_choice"),
        ("openai/openai_humaneval", "code"),
        ("codeparrot/apps", "code"),
        ("judge/essays", "judge"),
    ],
)
def test_data_sources_find_their_grader(data_source, grader):
    assert find_grader(data_source).name == grader


def test_an_unknown_data_source_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"data_source 'poems'.*custom_reward_function\.path.*gsm8k: \*gsm8k\*"):
        find_grader("poems")
    with pytest.raises(ValueError, match="rows without a data_source"):
        load_grader("")


def test_every_prompt_needs_a_grader_and_a_ground_truth():
    prompts = [
        Prompt(id=i, data_source="gsm8k", content="?", ground_truth=truth) for i, truth in enumerate(["1", None])
    ]
    check_gradable(prompts[:1])
    with pytest.raises(ValueError, match=r"1 of 2 prompts have no ground truth, the first is row 1"):
        check_gradable(prompts)
    with pytest.raises(ValueError, match="no reward function for data_source 'poems'"):
        check_gradable([Prompt(id=0, data_source="poems", content="?", ground_truth="1")])


@pytest.mark.parametrize("number", [1, 1.0, True, np.float32(1), np.array(1.0), np.array([1.0]), np.int64(1)])
def test_any_single_number_is_a_reward(number):
    assert to_score(number) == Score(1.0)
    assert type(to_score(number).reward) is float


def test_a_dict_with_reward_has_its_total():
    assert to_score({"reward": 0.75, "accuracy": 1, "format": 0}) == Score(0.75, {"accuracy": 1.0, "format": 0.0})


def test_a_dict_without_reward_is_summed():
    assert to_score({"accuracy": 1.0, "format": 0.5}) == Score(1.5, {"accuracy": 1.0, "format": 0.5})


def test_a_score_passes():
    score = Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no number")
    assert to_score(score) == score


def test_a_score_may_say_that_grading_failed():
    score = to_score(Score(0.5, outcome=Outcome.GRADER_FAILED, reason="the judge is away"))
    assert math.isnan(score.reward)
    assert (score.outcome, score.reason) == (Outcome.GRADER_FAILED, "the judge is away")


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (None, "the reward is a NoneType"),
        ("1.0", "the reward is a str"),
        ([1.0, 0.0], "the reward is a list of length 2. Return one number"),
        ([1.0], "the reward is a list of length 1"),
        (np.array([1.0, 2.0]), "the reward is a ndarray of length 2"),
        ({"accuracy": "high"}, "component 'accuracy' is a str"),
        ({}, "empty dict"),
        (1j, "the reward is a complex"),
        (math.nan, "the reward is nan"),
        (math.inf, "the reward is inf"),
        (-1e30, "the reward is -1e\\+30. Return a finite number from -1e\\+09 to 1e\\+09"),
        (10**400, "the reward is inf"),
        ({"accuracy": math.nan}, "component 'accuracy' is nan"),
        (Score(math.nan), "the reward is nan"),
        (SimpleNamespace(item=lambda: "x"), "the reward is a str"),
    ],
)
def test_anything_else_is_refused_with_a_reason(result, what):
    with pytest.raises((TypeError, ValueError), match=what):
        to_score(result)
