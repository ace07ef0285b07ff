"""Words of the command line and values of YAML files have the value and the type that was typed."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.keys import format_override, get_value
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, ExportConfig
from alphaapollo.utils.hub import expand_home

TEXTS = ["", "a b", "it's", "a\\", "\\'x", "c=1,d", "1e5", "true", "null", "ü\n2"]
TEXTS += ['say "hi"', "{a}", "[a]", "\\\\", "#x"]
TYPED = ["1e3", "1_000", "007", "0x10", "1.50", "+1", "-0", "true", "TRUE", "on", "nan", "2026-01-01", "12:30", "x"]
PATHS = ["org/name:config@v1.0#train", "~/a.parquet", "a/b#c", "1#x", "**/a?.csv", "./007/1e3", "s3_1.jsonl.gz#a-b"]


@pytest.mark.parametrize("value", [*TEXTS, TEXTS[1:], ["a,b"]], ids=repr)
def test_a_word_is_read_back_as_its_value(value: Any) -> None:
    assert load_config(Config, "ppo", [format_override("data.train_files", value)]).data.train_files == value


@pytest.mark.parametrize("text", TYPED)
def test_a_text_key_has_the_text_that_was_typed(text: str, tmp_path: Path) -> None:
    words = [f"{key}={text}" for key in ("trainer.experiment_name", "trainer.project_name", "data.val_files")]
    words += [f"data.train_files=[a,{text}]", f"reward.required=[{text}]"]
    config = load_config(Config, "ppo", words)
    assert (config.trainer.experiment_name, config.trainer.project_name) == (text, text)
    assert (config.data.train_files, config.data.val_files, config.reward.required) == (["a", text], text, [text])
    (tmp_path / "own.yaml").write_text(
        f"trainer: {{experiment_name: {text}}}\ndata: {{val_files: [a, {text}], shuffle: on}}\n"
    )
    for source in (f"--config={tmp_path}/own.yaml", f"--config-dir={tmp_path} --config-name=own"):
        config = load_config(Config, "ppo", [*source.split(), f"trainer.project_name='{text}'"])
        assert (config.trainer.experiment_name, config.trainer.project_name) == (text, text)
        assert config.data.val_files == ["a", text] and config.data.shuffle is True


def test_other_keys_keep_their_types(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("actor_rollout_ref: {actor: {optim: {lr: 1e-6}}}\ntrainer: {seed: 1_000}\n")
    config = load_config(Config, "ppo", [f"--config={tmp_path}/own.yaml"])
    assert (config.actor_rollout_ref.actor.optim.lr, config.trainer.seed) == (1e-6, 1000)
    config = load_config(Config, "ppo", ["trainer.seed=1_000", "trainer.keep_best=null", "data.shuffle=TRUE"])
    assert (config.trainer.seed, config.trainer.keep_best, config.data.shuffle) == (1000, None, True)
    assert load_config(Config, "ppo", ["env.settings.a=1e3"]).env.settings == {"a": 1000.0}  # text or number


@pytest.mark.parametrize("path", PATHS)
def test_entries_of_data_keys_need_no_quotes(path: str) -> None:
    data = load_config(Config, "ppo", [f"data.train_files={path}", f"data.val_files=[{path}, b#c]"]).data
    assert (data.train_files, data.val_files) == (expanduser(path), [expanduser(path), "b#c"])


def test_every_path_key_has_its_home_folder() -> None:
    keys = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "teacher.models.a.path")
    keys += ("reward_model.model.path", "custom_reward_function.path", "env.custom_module")
    keys += ("trainer.output_dir",)
    config = load_config(Config, "ppo", [f"{key}=~/m" for key in keys])
    assert {key: get_value(config, key) for key in keys} == dict.fromkeys(keys, expanduser("~/m"))
    assert load_config(Config, "ppo", ["actor_rollout_ref.model.path=a/~m"]).actor_rollout_ref.model.path == "a/~m"
    servers = load_config(Config, "ppo", ["env.mcp_servers.a.command=[python,'~/s.py']"]).env.mcp_servers
    assert servers["a"].command == ["python", expanduser("~/s.py")]
    assert load_config(ExportConfig, "export", ["output=~/out"]).output == expanduser("~/out")
    assert str(expand_home("~no-such-user/a")) == "~no-such-user/a"
