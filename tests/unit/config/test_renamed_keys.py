"""Renamed keys: an old name works for one minor version, and is an error that names the new key afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaapollo.api import format_settings
from alphaapollo.config import load, renamed_keys
from alphaapollo.config.__main__ import explain_key
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import COMMANDS, list_keys, list_sections
from alphaapollo.config.load import UserSettings, load_config_and_user_settings, save_config
from alphaapollo.config.port.translate import port_script
from alphaapollo.config.schema import Config
from alphaapollo.runs.resume import read_saved_config
from alphaapollo.viewer.run_folders import read_config

TABLE = {
    "trainer.rng": ("trainer.random", "0.5.0"),
    "trainer.random": ("trainer.seed", "0.7.2"),
    "sampler": ("actor_rollout_ref.rollout", "0.7.0"),
}
TEMPERATURE = "actor_rollout_ref.rollout.temperature"


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed_keys, "RENAMED_KEYS", TABLE)
    monkeypatch.setattr(renamed_keys, "__version__", "0.7.9")
    load._warn_of_old_name.cache_clear()


def read(*words: str) -> tuple[Config, UserSettings]:
    return load_config_and_user_settings(Config, "ppo", words)


def test_old_names_work_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "mine.yaml", tmp_path / "algorithm"
    file.write_text("trainer: {random: 3}\nsampler: {temperature: 0.5, val_kwargs: {n: 2}}\n")
    folder.mkdir()
    (folder / "own.yaml").write_text("# @package _global_\nsampler: {temperature: 0.25}\n")
    settings: dict[str, Any] = {"trainer.random": 3, "sampler": {"temperature": 0.5, "val_kwargs.n": 2}}
    for words in (
        ["trainer.random=3", "sampler.temperature=0.5", "++sampler.val_kwargs.n=2"],
        ["trainer={random: 3}", "sampler={temperature: 0.5, val_kwargs: {n: 2}}"],
        [f"--config={file}"],
        [f"--config={file}", "sampler.temperature=0.75", "sampler.temperature=0.5"],
        [f"--config-dir={tmp_path}", "--config-name=mine"],
        [f"--config-dir={tmp_path}", "algorithm=own", "trainer.random=3", "sampler.val_kwargs.n=2"],
        format_settings(settings, Config),
    ):
        config, user = read(*words)
        rollout = config.actor_rollout_ref.rollout
        temperature = 0.25 if "algorithm=own" in words else 0.5
        assert (config.trainer.seed, rollout.temperature, rollout.val_kwargs.n) == (3, temperature, 2), words
        assert "trainer.random" not in user.keys and not any(key.startswith("sampler") for key in user.keys)
        assert words[0].startswith("trainer={") or "trainer.seed" in user.keys
    lines = capsys.readouterr().err.splitlines()
    assert [[word in line for word in ("trainer.random", "trainer.seed", "0.8.0")] for line in lines] == [
        [True, True, True],
        [False, False, True],
    ]


def test_a_preset_still_wins_over_a_file_with_the_old_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("sampler: {temperature: 0.5}\n")
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/own.yaml").write_text(
        f"# @package _global_\n{yaml.safe_dump({'actor_rollout_ref': {'rollout': {'temperature': 0.25}}})}"
    )
    words = [f"--config={tmp_path / 'mine.yaml'}", f"--config-dir={tmp_path}", "algorithm=own"]
    assert read(*words)[0].actor_rollout_ref.rollout.temperature == 0.25
    assert read(*words, "sampler.temperature=0.75")[0].actor_rollout_ref.rollout.temperature == 0.75


def test_both_names_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("sampler: {temperature: 0.5}\n")
    (tmp_path / "both.yaml").write_text("sampler: {temperature: 1}\nactor_rollout_ref: {rollout: {temperature: 1}}\n")
    for words in (
        [f"{TEMPERATURE}=1", "sampler.temperature=0.5"],
        [f"--config={tmp_path / 'old.yaml'}", f"{TEMPERATURE}=1"],
        [f"--config={tmp_path / 'both.yaml'}"],
        [f"--config-dir={tmp_path}", "--config-name=both"],
    ):
        with pytest.raises(ConfigError) as error:
            read(*words)
        (line,) = error.value.errors
        assert line.startswith("sampler.temperature ") and TEMPERATURE in line
    read("sampler.temperature=0.5", "actor_rollout_ref.rollout.top_p=0.9")


def test_later_an_old_name_is_an_error_that_names_the_new_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("trainer: {random: 3}\n")
    monkeypatch.setattr(renamed_keys, "__version__", "0.8.0")
    for words in (["trainer.random=3"], [f"--config={tmp_path / 'mine.yaml'}"]):
        with pytest.raises(ConfigError) as error:
            read(*words)
        (line,) = error.value.errors
        assert line.startswith("trainer.random ") and "trainer.seed" in line and "0.8.0" in line


def test_a_name_that_was_renamed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.rng .*trainer\.seed"):
        read("trainer.rng=3")
    monkeypatch.setattr(renamed_keys, "__version__", "0.5.1")
    assert read("trainer.rng=3")[0].trainer.seed == 3


@pytest.mark.parametrize("version", ["0.7.9", "0.8.0", "1.0.0"])
def test_saved_configurations_are_read_in_every_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(renamed_keys, "__version__", version)
    save_config(Config(), tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    values["sampler"] = values["actor_rollout_ref"].pop("rollout") | {"temperature": 0.5}
    values["trainer"]["rng"] = values["trainer"].pop("seed") + 3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    for saved in (read_saved_config(tmp_path), read_config(tmp_path)):
        config = Config.model_validate(saved)
        assert (config.trainer.seed, config.actor_rollout_ref.rollout.temperature) == (3, 0.5)
    assert capsys.readouterr().err == ""


def test_explain_and_port_translate_old_names() -> None:
    assert explain_key("sampler.temperature=1").startswith(f"sampler.temperature: renamed to {TEMPERATURE} (in 0.7.0;")
    script = port_script("python3 -m verl.trainer.main_ppo sampler.temperature=0.5\n", "run.sh")
    assert f"{TEMPERATURE}=0.5" in script and "was sampler.temperature" in script


def test_entries_of_the_table_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = {name for schema in COMMANDS.values() for name in (*list_keys(schema), *list_sections(schema))}
    for table, valid in ((TABLE, True), ({"trainer.seed": ("trainer.rng", "0.7.0")}, False)):
        monkeypatch.setattr(renamed_keys, "RENAMED_KEYS", table)
        new = {renamed_keys.find_new_name(old) for old in table}
        assert (new <= accepted and accepted.isdisjoint(table)) is valid
    monkeypatch.undo()
    new = {renamed_keys.find_new_name(old) for old in renamed_keys.RENAMED_KEYS}
    assert new <= accepted and accepted.isdisjoint(renamed_keys.RENAMED_KEYS)


def test_removed_keys_are_dropped_from_saved_configurations_only(tmp_path: Path) -> None:
    key = "actor_rollout_ref.ref.log_probs_ahead"
    save_config(load_config_and_user_settings(Config, "ppo", [])[0], tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    values["actor_rollout_ref"]["ref"]["log_probs_ahead"] = True
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert "log_probs_ahead" not in read_config(tmp_path)["actor_rollout_ref"]["ref"]
    with pytest.raises(ConfigError, match=rf"{key} \(got true\): removed in"):
        read(f"{key}=true")
