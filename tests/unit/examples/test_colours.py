"""The images and the game of the colours example."""

import random
from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.environments import check_environment
from alphaapollo.environments.base import Environment
from alphaapollo.types import IMAGE_MARK, Message, Prompt
from alphaapollo.utils.user_module import load_user_module
from examples.colours.task import ask
from tests.unit.environments.episode_helpers import make

EXAMPLE = Path(__file__).parents[3] / "examples" / "colours"
FIRST = [Message(role="user", content=f"{IMAGE_MARK}colour?", images=[b""])]
PROMPT = Prompt(3, "exact/colours", FIRST, "red", env_kwargs={"colours": ["red", "blue"]})


def config(name: str) -> Config:
    return load_config(Config, "ppo", ["--config-dir", str(EXAMPLE), "--config-name", name])


@pytest.fixture
def game() -> Environment:
    loaded = config("grpo_two_turns").env
    load_user_module(str(EXAMPLE / "environment.py"), "env.custom_module")
    check_environment(loaded)
    return make(loaded)


@pytest.mark.parametrize(("answer", "reward"), [("blue", 1), ("red", 0)])
def test_game_shows_a_second_image_and_grades_its_colour(game: Environment, answer: str, reward: float):
    assert game.reset(PROMPT).messages == FIRST
    shown, end = game.step("red"), game.step(answer)
    assert not shown.done and shown.observation.messages == [ask("blue", random.Random(3))]
    assert end.done and end.score.reward == reward
    game.reset(PROMPT)
    wrong = game.step("green")  # a wrong first answer ends the game
    assert wrong.done and wrong.score.reward == 0 and wrong.observation is None
