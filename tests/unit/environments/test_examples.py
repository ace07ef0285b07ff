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
from examples.grid_world import teacher as grid_teacher
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


def test_all_configs_use_the_same_grid_world():
    group = config("grid_world")
    for name in ("ppo", "turn_ppo", "turn_group"):
        other = config("grid_world", name)
        assert other.algorithm.adv_estimator == {"ppo": "gae", "turn_ppo": "turn_gae"}.get(name, name)
        assert other.env.settings == group.env.settings and other.env.max_steps == group.env.max_steps
        assert other.trajectories_per_batch == group.trajectories_per_batch == 32 * 16
        assert (other.env.context, other.env.rollout.n) == ("memory", 16 if name == "turn_group" else 1)


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


def test_grid_world_teacher_matches_the_environment():
    env = config("grid_world").env
    assert (env.settings["size"], env.max_steps) == (grid_teacher.SIZE, grid_teacher.STEPS)
    rng, taught = random.Random(0), set()
    for _ in range(5000):
        taught.add(grid_teacher.turn(rng)[0]["content"])
    for id in range(40):
        world = make(env)
        shown = asyncio.run(world.reset(Prompt(id, "text", ""))).messages
        while True:
            assert shown[-1]["content"] in taught
            result = asyncio.run(world.step(grid_teacher.turn(rng)[1]["content"]))
            assert result.valid
            if result.done:
                break
            shown = result.observation.messages
