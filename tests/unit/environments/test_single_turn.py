import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment, get_environment_spec, register_environment
from alphaapollo.environments.base import Observation
from alphaapollo.types import Message, Prompt, Score
from tests.unit.environments.episode_helpers import contains_truth, game, take_turns

CHAT = [Message(role="user", content="2+2=?")]


@pytest.mark.parametrize(
    ("content", "first", "answer", "reward"), [(CHAT, Observation(CHAT), "4", 1.0), ("2+2=", "2+2=", "5", 0.0)]
)
def test_chat_or_text_prompt_is_answered_and_graded(content, first, answer, reward):
    prompt = Prompt(0, "exact", content, ground_truth="4")
    shown, (result,) = take_turns(Env(), prompt, answer, score=contains_truth)
    assert shown == first
    assert result.done and result.observation is None and result.score == Score(reward)


def test_unknown_and_duplicate_names():
    with pytest.raises(ValueError, match=r"'single_trun'.*'single_turn'"):
        get_environment_spec("single_trun")
    with pytest.raises(ValueError, match="registered twice"):
        register_environment("single_turn")(get_environment_spec("single_turn").factory)


@pytest.mark.parametrize(
    ("env", "error"),
    [
        (Env(settings={"size": 5}), r"env\.settings=\{'size': 5\}: single_turn"),
        (game("grid_world", settings={"siez": 5}), r"env\.settings\.siez .*Did you mean 'size'"),
        (game("grid_world", settings={"size": 1}), r"env\.settings\.size: .*>= 2 .*got 1"),
    ],
)
def test_settings_that_an_environment_does_not_have_are_refused(env, error):
    with pytest.raises(ValueError, match=error):
        check_environment(env)
