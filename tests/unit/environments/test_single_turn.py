import asyncio

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import base, check_environment, get_environment_spec, register_environment
from alphaapollo.environments.base import Observation, Services
from alphaapollo.types import Message, Outcome, Prompt, Score
from tests.unit.environments.episode_helpers import game

CHAT = [Message(role="user", content="2+2=?")]


async def grade(prompt: Prompt, text: str) -> Score:
    return Score(float(text == prompt.ground_truth))


def play(prompt: Prompt, answer: str):
    async def run():
        environment = get_environment_spec("single_turn").factory(Services(grade, Env()))
        first = await environment.reset(prompt)
        result = await environment.step(answer)
        await environment.close()
        return first, result

    return asyncio.run(run())


def test_chat_prompt():
    first, result = play(Prompt(0, "exact", CHAT, ground_truth="4"), "4")
    assert first == Observation(CHAT)
    assert result.done and result.observation is None
    assert result.score == Score(1.0, outcome=Outcome.SCORED)


def test_text_prompt():
    first, result = play(Prompt(0, "exact", "2+2=", ground_truth="4"), "5")
    assert first == "2+2="
    assert result.score is not None and result.score.reward == 0.0


def test_unknown_environment():
    with pytest.raises(ValueError, match=r"'single_trun'.*'single_turn'"):
        get_environment_spec("single_trun")


def test_duplicate_registration():
    with pytest.raises(ValueError, match="registered twice"):
        register_environment("single_turn")(get_environment_spec("single_turn").factory)


def test_class_with_missing_methods():
    class Halfway:
        def __init__(self, services): ...

        def step(self, action): ...

    register_environment("halfway")(Halfway)
    try:
        with pytest.raises(ValueError, match=r"halfway: .*Halfway .*reset, close\."):
            check_environment(Env(env_name="halfway"))
    finally:
        base._ENVIRONMENTS._entries.pop("halfway")


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
