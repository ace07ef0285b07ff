import math
from dataclasses import replace

import pytest

from alphaapollo.rewards.base import make_failed_score
from alphaapollo.rewards.components import COMPONENTS, add_component_rewards, check_component_names, load_components
from alphaapollo.types import Outcome, Prompt, Score

MAGISTRAL = {"task": 0.9, "format": 0.1, "language": 0.1}
RIGHT = Score(1.0, {"accuracy": 1.0})


SUMS = [
    (RIGHT, {"format": 1.0, "language": 1.0}, MAGISTRAL, [], 1.1),
    (Score(0.0, {"accuracy": 0.0}), {"format": 1.0, "language": 1.0}, MAGISTRAL, [], 0.2),
    (RIGHT, {"repetition": 0.75}, {"repetition": 0.4}, [], 1.3),  # the task weighs 1 unless it is listed
    (RIGHT, {"repetition": 0.75}, {"repetition": -2.0}, [], -0.5),
    (Score(0.5), {"format": 1.0}, {"format": 1.0}, [], 1.5),  # without an accuracy
    (Score(1.75, {"accuracy": 0.25, "length": 1.5}), {"format": 0.0}, {"task": 2.0, "format": 0.1}, [], 3.5),
    (Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no number"), {"language": 1.0}, MAGISTRAL, [], 0.1),
    # without a required component, the whole reward is 0
    (RIGHT, {"format": 0.0, "repetition": 0.25}, {"format": 0.1, "repetition": 0.0}, ["format"], 0.0),
    (RIGHT, {"format": 0.0, "repetition": 0.25}, {"format": 0.1, "repetition": 0.0}, ["task"], 1.0),
    (RIGHT, {"format": 0.0, "repetition": 0.25}, {"format": 0.1, "repetition": 0.0}, ["repetition"], 1.0),
]


@pytest.mark.parametrize(("task", "parts", "weights", "required", "reward"), SUMS)
def test_the_reward_is_the_weighted_sum(task, parts, weights, required, reward):
    score = add_component_rewards(task, parts, weights, required)
    accuracy = {} if task.accuracy is None else {"accuracy": task.accuracy}
    components = {**accuracy, **task.components, "task": task.reward, **parts}
    assert score == replace(task, reward=pytest.approx(reward, rel=1e-15), components=components)
    assert score.accuracy == task.accuracy


def test_a_failed_task_stays_failed():
    score = add_component_rewards(make_failed_score("the judge is away"), {"format": 1.0}, MAGISTRAL, [])
    assert (score.outcome, score.reason, score.components) == (Outcome.GRADER_FAILED, "the judge is away", {})
    assert math.isnan(score.reward)


@pytest.mark.parametrize("name", ["format", "task"])
def test_duplicate_name_is_a_failure(name):
    score = add_component_rewards(Score(1.0, {name: 1.0}), {"format": 1.0}, {"format": 1.0}, [])
    assert score.outcome is Outcome.GRADER_FAILED
    assert f"both name {name}. " in score.reason


def test_names_are_checked_at_startup():
    check_component_names([], [])
    check_component_names(["task", "format", "language"], ["format", "task"])
    with pytest.raises(ValueError, match=r"'formt'.*'format'.*Known: format, .*lang"):
        check_component_names(["formt", "format"], [])
    with pytest.raises(ValueError, match=r"required: format .*reward.components"):
        check_component_names(["language"], ["format"])


def test_every_component_grades_any_text_between_0_and_1():
    prompt = Prompt(0, "", "?")
    functions = load_components(["task", *COMPONENTS.names()])
    assert functions.keys() == {"format", "format_opened", "language", "repetition", "think_format"}
    for function in functions.values():
        for text in ("", " \n", "\0", "\ud800", "<think>", "</think>" * 3, "🙂" * 9, "क्या", "a" * 1000):
            assert 0.0 <= function(prompt, text) <= 1.0
