"""Renamed and removed keys: errors that say what to write; saved configurations are read under the new names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from alphaapollo.config import renamed_keys
from alphaapollo.config.__main__ import explain_key
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import COMMANDS, list_keys, list_sections
from alphaapollo.config.load import load_config, save_config
from alphaapollo.config.schema import Config
from alphaapollo.runs.resume import read_saved_config

TABLE = {"trainer.rng": "trainer.random", "trainer.random": "trainer.seed", "sampler": "actor_rollout_ref.rollout"}
TEMPERATURE = "actor_rollout_ref.rollout.temperature"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed_keys, "RENAMED_KEYS", TABLE)


@pytest.mark.usefixtures("table")
def test_an_old_name_is_an_error_with_the_new_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer: {random: 3}\n")
    for words in (["trainer.random=3"], ["trainer.rng=3"], [f"--config={tmp_path / 'mine.yaml'}"]):
        with pytest.raises(ConfigError) as error:
            load_config(Config, "ppo", words)
        (line,) = error.value.errors
        assert line.startswith("trainer.r") and "renamed to trainer.seed" in line


@pytest.mark.usefixtures("table")
def test_saved_configurations_are_read_under_the_new_names(tmp_path: Path) -> None:
    save_config(Config(), tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    values["sampler"] = values["actor_rollout_ref"].pop("rollout") | {"temperature": 0.5}
    values["trainer"]["rng"] = values["trainer"].pop("seed") + 3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    config = Config.model_validate(read_saved_config(tmp_path))
    assert (config.trainer.seed, config.actor_rollout_ref.rollout.temperature) == (3, 0.5)


@pytest.mark.usefixtures("table")
def test_explain_translates_old_names() -> None:
    assert explain_key("sampler.temperature=1") == f"sampler.temperature: renamed to {TEMPERATURE}"


def test_entries_of_the_table_are_valid() -> None:
    accepted = {name for schema in COMMANDS.values() for name in (*list_keys(schema), *list_sections(schema))}
    for table in (TABLE, renamed_keys.RENAMED_KEYS):
        assert accepted.isdisjoint(table) and set(table.values()) <= accepted | {*table}


def test_removed_keys_are_dropped_from_saved_configurations_only(tmp_path: Path) -> None:
    key = "actor_rollout_ref.ref.log_probs_ahead"
    save_config(Config(), tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    values["actor_rollout_ref"]["ref"]["log_probs_ahead"] = True
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert "log_probs_ahead" not in read_saved_config(tmp_path)["actor_rollout_ref"]["ref"]
    with pytest.raises(ConfigError, match=rf"{key} \(got true\): removed: "):
        load_config(Config, "ppo", [f"{key}=true"])


def test_a_renamed_preset_is_an_error_with_the_new_name() -> None:
    with pytest.raises(ConfigError, match=r"algorithm=trpo_dual: renamed to algorithm=reference_kl_dual\."):
        load_config(Config, "ppo", ["algorithm=trpo_dual"])
    for new in renamed_keys.RENAMED_PRESETS.values():
        load_config(Config, "ppo", [new])
