import math

import pytest

from alphaapollo.rewards.base import make_failed_score
from alphaapollo.rewards.components import COMPONENTS, add_component_rewards, check_component_names, load_components
from alphaapollo.types import Outcome, Prompt, Score

MAGISTRAL = {"task": 0.9, "format": 0.1, "language": 0.1}
RIGHT = Score(1.0, {"accuracy": 1.0})


@pytest.mark.parametrize(
    ("task", "parts", "weights", "reward"),
    [
        (RIGHT, {"format": 1.0, "language": 1.0}, MAGISTRAL, 1.1),
        (RIGHT, {"format": 1.0, "language": 0.0}, MAGISTRAL, 1.0),
        (Score(0.0, {"accuracy": 0.0}), {"format": 1.0, "language": 1.0}, MAGISTRAL, 0.2),
        (RIGHT, {"repetition": 0.75}, {"repetition": 0.4}, 1.3),  # the task weighs 1 unless it is listed
        (RIGHT, {"repetition": 0.75}, {"repetition": -2.0}, -0.5),
        (RIGHT, {}, {"task": 3.0}, 3.0),
        (RIGHT, {"format": 1.0}, {"task": 0.0, "format": 0.0}, 0.0),
    ],
)
def test_the_reward_is_the_weighted_sum(task, parts, weights, reward):
    score = add_component_rewards(task, parts, weights, [])
    assert score.reward == pytest.approx(reward, rel=1e-15)
    assert score.components == {"accuracy": task.reward, "task": task.reward, **parts}
    assert score.accuracy == task.reward


def test_components_and_accuracy_of_the_task_are_kept():
    task = Score(1.75, {"accuracy": 0.25, "length": 1.5})
    score = add_component_rewards(task, {"format": 0.0}, {"task": 2.0, "format": 0.1}, [])
    assert score == Score(3.5, {"accuracy": 0.25, "length": 1.5, "task": 1.75, "format": 0.0})


def test_reward_is_the_default_accuracy():
    assert add_component_rewards(Score(0.5), {"format": 1.0}, {"format": 1.0}, []).components["accuracy"] == 0.5


@pytest.mark.parametrize(("required", "reward"), [([], 1.0), (["format"], 0.0), (["task"], 1.0), (["repetition"], 1.0)])
def test_without_a_required_component_the_whole_reward_is_0(required, reward):
    parts = {"format": 0.0, "repetition": 0.25}
    score = add_component_rewards(RIGHT, parts, {"format": 0.1, "repetition": 0.0}, required)
    assert score == Score(reward, {"accuracy": 1.0, "task": 1.0, **parts})


def test_a_wrong_format_of_the_task_is_kept():
    task = Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no number")
    score = add_component_rewards(task, {"language": 1.0}, {"language": 0.1}, [])
    assert (score.reward, score.outcome, score.reason) == (0.1, Outcome.WRONG_FORMAT, "no number")


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
    assert functions.keys() == {"format", "format_opened", "language", "repetition"}
    for function in functions.values():
        for text in ("", " \n", "\0", "\ud800", "<think>", "</think>" * 3, "🙂" * 9, "क्या", "a" * 1000):
            assert 0.0 <= function(prompt, text) <= 1.0
