from pathlib import Path

import pytest
import yaml

from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.schema import Config
from alphaapollo.config.verl import find_values_meant_for_verl

ROOT = Path(__file__).resolve().parents[3]
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
FILES = sorted((ROOT / "examples").glob("*/*.yaml"))
RECIPES = [file for file in FILES if "actor_rollout_ref" in yaml.safe_load(file.read_text())]


def notices(*argv: str) -> list[str]:
    config, user_settings = load_config_and_user_settings(Config, "ppo", argv)
    return list(find_values_meant_for_verl(config, user_settings.keys))


def test_a_mini_batch_of_prompts():
    prompts = ["data.train_batch_size=1024", "actor_rollout_ref.rollout.n=5"]
    (line,) = notices(*prompts, f"{MINI_BATCH}=256")
    assert "20 optimizer steps" in line  # 5120 / 256
    assert "256 prompts x 5" in line and "1280" in line
    assert notices(*prompts, f"{MINI_BATCH}=1280") == []  # more than the prompts: it can only be trajectories
    assert notices(*prompts) == []  # not set by the user
    assert notices("data.train_batch_size=1024", f"{MINI_BATCH}=256") == []  # one sample a prompt: the same


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_example_configurations_get_no_warning(file: Path):
    assert notices("--config-dir", str(file.parent), "--config-name", file.stem) == []
