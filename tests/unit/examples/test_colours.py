"""The images and the game of the colours example."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.environments import check_environment
from alphaapollo.environments.base import Environment
from alphaapollo.types import IMAGE_MARK, Message, Prompt
from alphaapollo.utils.user_module import load_user_module
from examples.colours.task import COLOURS, ask, draw_shape
from tests.unit.environments.episode_helpers import make

EXAMPLE = Path(__file__).parents[3] / "examples" / "colours"
FIRST = [Message(role="user", content=f"{IMAGE_MARK}colour?", images=[b""])]
PROMPT = Prompt(3, "exact/colours", FIRST, "red", env_kwargs={"colours": ["red", "blue"]})


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)), dtype=int)


def config(name: str) -> Config:
    return load_config(Config, "ppo", ["--config-dir", str(EXAMPLE), "--config-name", name])


@pytest.fixture
def game() -> Environment:
    loaded = config("grpo_two_turns").env
    load_user_module(str(EXAMPLE / "environment.py"), "env.custom_module")
    check_environment(loaded)
    return make(loaded)


def recognize(png: bytes) -> str:
    """Return the colour of the shape: the brightest pixel is in it."""
    drawn = pixels(png).reshape(-1, 3)
    shade = drawn[drawn.sum(1).argmax()]
    return min(COLOURS, key=lambda name: np.abs(shade - COLOURS[name]).sum())


@pytest.mark.parametrize("colour", COLOURS)
def test_image_has_a_shape_of_the_colour(colour: str):
    for seed in range(5):
        png = draw_shape(colour, random.Random(seed))
        assert png == draw_shape(colour, random.Random(seed))
        assert pixels(png).shape == (32, 32, 3) and recognize(png) == colour


@pytest.mark.parametrize(("answer", "reward"), [("blue", 1), ("red", 0)])
def test_game_shows_a_second_image_and_grades_its_colour(game: Environment, answer: str, reward: float):
    assert game.reset(PROMPT).messages == FIRST
    shown, end = game.step("red"), game.step(answer)
    assert not shown.done and shown.observation.messages == [ask("blue", random.Random(3))]
    assert end.done and end.score.reward == reward
    game.reset(PROMPT)
    wrong = game.step("green")  # a wrong first answer ends the game
    assert wrong.done and wrong.score.reward == 0 and wrong.observation is None
