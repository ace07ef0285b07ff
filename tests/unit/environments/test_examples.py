"""The configurations of the games of the examples are valid."""

from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.environments import check_environment
from alphaapollo.utils.user_module import load_user_module

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
