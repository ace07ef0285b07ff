"""The teachers of the examples match their environments, and their configs are valid."""

import asyncio
import random
from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.environments import check_environment
from alphaapollo.types import Prompt
from alphaapollo.utils.user_module import load_user_module
from examples.guessing_game import teacher as guessing_teacher
from tests.unit.environments.episode_helpers import make

EXAMPLES = Path(__file__).parents[3] / "examples"
MAIN = {"guessing_game": "grpo", "grid_world": "gigpo"}


def config(name: str, experiment: str = "") -> Config:
    words = ["--config-dir", str(EXAMPLES / name), "--config-name", experiment or MAIN.get(name, "grpo")]
    loaded = load_config(Config, "ppo", words)
    if loaded.env.custom_module:
        load_user_module(str(EXAMPLES.parent / loaded.env.custom_module), "env.custom_module")
    return loaded


@pytest.mark.parametrize("name", MAIN)
def test_configs_are_valid(name: str):
    assert not check_environment(config(name).env).graded
    sft = load_config(SftConfig, "sft", ["--config-dir", str(EXAMPLES / name), "--config-name", "sft"])
    assert sft.trainer.project_name == config(name).trainer.project_name == name


def test_guessing_game_teacher_matches_the_environment():
    rng, env = random.Random(0), config("guessing_game").env
    for _ in range(50):
        game = make(env)
        first = asyncio.run(game.reset(Prompt(0, "text", "")))
        chat = guessing_teacher.play(game.target, rng)
        assert chat[0] == first.messages[0]
        for place in range(1, len(chat), 2):
            result = asyncio.run(game.step(chat[place]["content"]))
            assert result.valid and result.done == (place == len(chat) - 1)
            assert result.done or result.observation.messages == [chat[place + 1]]
