"""Keys of the environments of other packages."""

from pathlib import Path

import pytest
import yaml

from alphaapollo.config.build import build_config
from alphaapollo.config.changes import find_changes
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config, save_config
from alphaapollo.config.schema import Config
from alphaapollo.runs.newest_model import load_run_model
from tests.unit.environments.test_environment_docs import example
from tests.unit.runs.test_newest_model import model


def test_what_another_run_is():
    saved, words = Config().model_dump(mode="json"), ["env.reasoning_gym.tasks=[a]", "env.verifiers.name=b"]
    changes = find_changes(saved, load_config(Config, "ppo", [*words, "env.openenv.url=c"]))
    verdicts = {change.key: change.verdict for change in changes}
    assert {key: verdicts[key] for key in verdicts if key.startswith("env.")} == {
        "env.reasoning_gym.tasks": "refused",
        "env.verifiers.name": "refused",
        "env.openenv.url": "applied",
    }


def test_settings_of_tasks():
    assert build_config(Config, yaml.safe_load(example("yaml"))).env.find_plugin_section("reasoning_gym").level == 2
    section = load_config(Config, "ppo", ["env.reasoning_gym.settings.chain_sum.max_terms=3"]).env
    assert section.find_plugin_section("reasoning_gym").settings == {"chain_sum": {"max_terms": 3}}


@pytest.mark.parametrize("word", ["env.openenv.url=http://x", "env.verifiers.python=./python", "env.verifiers.name=a"])
def test_code_that_a_folder_names_needs_the_command_line(tmp_path: Path, word: str):
    save_config(load_config(Config, "ppo", [word]), tmp_path / "run/config.yaml")
    model(tmp_path / "run/model")
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        load_run_model(str(tmp_path / "run"), [])
    load_run_model(str(tmp_path / "run"), [word])
