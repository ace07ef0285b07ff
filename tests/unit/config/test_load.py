from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from alphaapollo.config.errors import ConfigError, exit_on_config_error
from alphaapollo.config.keys import COMMANDS, get_value
from alphaapollo.config.load import (
    SavedConfig,
    build_config,
    find_shipped_config_folder,
    load_config,
    load_config_and_user_settings,
    save_config,
)
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.runs.resume import read_saved_config

SHIPPED = find_shipped_config_folder()
OPTIM = "actor_rollout_ref.actor.optim"


def load(*argv: str) -> Config:
    return load_config(Config, "ppo", argv)


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def test_no_arguments_give_the_schema_defaults():
    assert load() == Config()
    assert load_config(SftConfig, "sft", []) == SftConfig()


def test_every_key_is_overridden_with_or_without_a_plus():
    values = {
        "+trainer.seed=3": 3,
        "trainer.experiment_name=7": "7",  # a number as text
        "data.val_files=": "",
        "trainer.total_training_steps=7": 7,
        "data.train_files=[a.parquet,b.parquet]": ["a.parquet", "b.parquet"],
        f"{OPTIM}.betas=[0.9,0.95]": (0.9, 0.95),
        f"{OPTIM}.lr=1e-6": 1e-6,
        "actor_rollout_ref.actor.use_kl_loss=True": True,
        "trainer.logger=['console','wandb']": ["console", "wandb"],
    }
    config = load(*values)
    assert [get_value(config, word.strip("+").partition("=")[0]) for word in values] == [*values.values()]


def test_names_in_maps_are_set_one_by_one():
    words = ["reward.components.format=0.1", "reward.components={language: 0.2}", "+reward.components.task=0.9"]
    words += ["env.tool_settings.local_rag.index=a/b"]
    config = load_config(Config, "ppo", [*words, "env.mcp_servers.files.command=[a,b]", "~reward.components.task"])
    assert config.reward.components == {"format": 0.1, "language": 0.2}
    assert config.env.tool_settings == {"local_rag": {"index": "a/b"}}
    assert config.env.mcp_servers["files"].command == ["a", "b"]


@pytest.mark.parametrize("file", sorted(SHIPPED.rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_shipped_file_loads_and_a_preset_changes_something(file: Path):
    if file.parent == SHIPPED:
        load_config(COMMANDS[file.stem if file.stem in COMMANDS else f"main_{file.stem}"], file.stem, [])
    else:
        assert load(f"{file.parent.name}={file.stem}") != Config()


def test_presets_combine_and_the_command_line_wins():
    config = load("algorithm=dapo", "cluster=laptop", "env.rollout.n=4")
    assert config.algorithm.filter_groups.enable
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28
    assert config.trainer.device == "cpu"
    assert config.group_size == 4


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "algorithm").mkdir()
    for name, text in {
        "mine": "defaults: [ppo, _self_]\nalgorithm: {adv_estimator: grpo, gamma: 0.5}\n",
        "plain": "trainer: {seed: 5}\n",
        "selfless": "defaults: [algorithm: dapo]\nalgorithm: {adv_estimator: rloo, gamma: 0.5}\n",
        "picked": "defaults: [ppo, algorithm: dapo, _self_]\nenv: {rollout: {n: 2}}\n",
        "algorithm/own": "# @package _global_\nalgorithm: {lam: 0.25}\n",
        "wrong": "data: {train_filez: a, seed: '8'}\ncritic: 3\nfoo: {bar: 1}\n",
        "broken": "data:\n  train_files: [a\n",
        "absent": "defaults: [nothing_here]\n",
        "one": "defaults: [other, _self_]\n",
        "other": "defaults: [one, _self_]\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_own_folder_is_searched_first_and_builds_on_the_shipped_one(own: Path):
    config = load("--config-dir", str(own), "--config-name", "mine.yaml", "algorithm.lam=0.9")
    assert (config.algorithm.gamma, config.algorithm.lam, config.algorithm.adv_estimator) == (0.5, 0.9, "grpo")


def test_a_yaml_without_a_defaults_list_still_has_every_key(own: Path):
    config = load("--config-dir", str(own), "--config-name", "plain", "trainer.nnodes=2", "algorithm=dapo")
    assert (config.trainer.seed, config.trainer.nnodes, config.algorithm.filter_groups.enable) == (5, 2, True)


def test_presets_of_a_yaml_without_self_override_it(own: Path):
    algorithm = load("--config-dir", str(own), "--config-name", "selfless").algorithm
    assert (algorithm.adv_estimator, algorithm.gamma) == ("grpo", 0.5)


def test_command_line_preset_overrides_the_yaml_or_replaces_its_preset(own: Path):
    assert load("--config-dir", str(own), "--config-name", "mine", "algorithm=rloo").algorithm.adv_estimator == "rloo"
    picked = ["--config-dir", str(own), "--config-name", "picked"]
    assert load(*picked).algorithm.filter_groups.enable
    replaced = load(*picked, "algorithm=own")
    assert (replaced.algorithm.filter_groups.enable, replaced.algorithm.lam, replaced.group_size) == (False, 0.25, 2)


def test_unknown_keys_are_all_named_with_the_nearest(own: Path):
    one, other = problem("trainer.sede=1", "lr=2").splitlines()
    assert "trainer.sede (got 1):" in one and "'trainer.seed'" in one and "lr (got 2):" in other
    text = problem("--config-dir", str(own), "--config-name", "wrong")
    facts = ("data.train_filez (got a):", "'data.train_files'", "data.seed:", '"8".', "critic:", "foo.bar (got 1):")
    assert [fact for fact in facts if fact not in text] == []


def test_keys_of_verl_are_answered():
    words = ["trainer.default_local_dir=x", "actor_rollout_ref.actor.use_dynamic_bsz=True", "reward_model.rollout.n=1"]
    text = problem(*words)
    assert len(text.splitlines()) == 3 and "renamed to trainer.output_dir" in text and "dropped because" in text
    assert "not supported (" in text and "instead: " in text


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("trainer.seed=1.5", ["trainer.seed:", "integer", "1.5."]),
        ("trainer.seed=" + "9" * 5000, ["trainer.seed=999"]),  # more digits than Python reads
        ("algorithm.gamma=nan", ["algorithm.gamma:", "NaN"]),
        (f"{OPTIM}.lr=inf", [f"{OPTIM}.lr:", "0.0", "Infinity"]),
        (f"{OPTIM}.betas=[0.9]", [f"{OPTIM}.betas:", "list of 2", "[0.9]"]),
        ("data.train_batch_size=0", ["data.train_batch_size:", "> 0", "0."]),
        ("trainer.logger=wandb", ["trainer.logger:", "list of text", '"wandb".']),
        ("trainer.logger=[wandb,wandbb]", ["trainer.logger=[", "unknown tracker wandbb", "'wandb'", "tensorboard"]),
        ("trainer.device=CPU", ["trainer.device:", "auto | cpu | cuda", '"CPU"', "'cpu'"]),
        ("trainer.resume_from_path=null", ["trainer.resume_from_path:", "text", "null."]),
        ("algorithm.kl_ctrl=3", ["algorithm.kl_ctrl:", "type, kl_coef", "3."]),
        ("algorithm.gdpo_conditions={length: accuracy}", ["algorithm.gdpo_conditions", "list of 2", "accuracy"]),
        ("actor_rollout_ref.actor.kl_loss_type=k4", ["kl_loss_type:", '"k4"', "'kl' or 'k3'"]),
        ("reward.components.format=x", ["reward.components:", "number", '{"format": "x"}']),
        ("data.train_files=a,b", ["data.train_files=a,b", "'data.train_files=[a,b]'."]),
        ("data.train_files=${nothing}", ["'nothing'", "data.train_files"]),
        *((word, [f"{word}:", "KEY=VALUE"]) for word in ("=", "=1", ".=1")),  # no presets
        ("algorithm=grpoo", ["algorithm=grpoo:", "'grpo'?"]),
        ("--config-name=nothing", ["--config-name nothing:", "nothing.yaml"]),
        ("--config-dir=/nothing/here", ["--config-dir /nothing/here:"]),
        ("--config-nam=ppo", ["--config-nam=ppo.", "--config-name"]),
        ("data.curriculum.stages=[{data_source: a, treshold: 0.5}]", ["data.curriculum.stages.0.treshold (got 0.5):"]),
    ],
)
def test_one_error_names_the_key_and_the_value(override: str, facts: list[str]):
    text = problem(override)
    assert [fact for fact in facts if fact not in text] == [], text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "fact"), [("broken", "broken.yaml: "), ("absent", "nothing_here.yaml"), ("one", "include each other")]
)
def test_a_yaml_that_cannot_be_read_is_one_line(own: Path, name: str, fact: str):
    text = problem("--config-dir", str(own), "--config-name", name)
    assert fact in text
    assert len(text.splitlines()) == 1


def test_file_of_any_name_overrides_the_defaults(tmp_path: Path):
    (tmp_path / "data").mkdir()  # a folder beside it is no group of presets
    (tmp_path / "data" / "notes.yaml").write_text("a: [\n")
    file = tmp_path / "my first run.yml"
    file.write_text("defaults:\n  - algorithm: dapo\n  - _self_\ntrainer: {seed: 5, nnodes: 2}\n")
    config, user_settings = load_config_and_user_settings(
        Config, "ppo", ["--config", str(file), "trainer.nnodes=3", "algorithm.lam=0.5"]
    )
    assert (config.trainer.seed, config.trainer.nnodes, config.algorithm.filter_groups.enable) == (5, 3, True)
    assert user_settings.keys == {"trainer.seed", "trainer.nnodes", "algorithm.lam"}
    assert load("--config", str(file), "algorithm=rloo").algorithm.adv_estimator == "rloo"


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("data: [a\n", ["own.yaml", "while parsing"]),
        ("7\n", ["KEY: VALUE", "7"]),
        ("defaults: [{algorithm: dapoo}]\n", ["algorithm=dapoo:", "algorithm/dapoo.yaml"]),
        ("defaults: 3\n", ["defaults", "list"]),
        ("env: {tools: {calculator: 1}}\n", ["env.tools:", "list of text", "calculator"]),
        ("trainer: {experiment_name: '${nothing}'}\n", ["'nothing'"]),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path: Path, text: str, facts: list[str]):
    (tmp_path / "own.yaml").write_text(text)
    error = problem("--config", str(tmp_path / "own.yaml"))
    assert [fact for fact in facts if fact not in error] == [], error


@pytest.mark.parametrize(("schema", "name", "has_recipes"), [(Config, "ppo", True), (SftConfig, "sft", False)])
def test_help_lists_the_presets_that_fit_the_command(
    schema: type[BaseModel], name: str, has_recipes: bool, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match=r"^0$"):
        load_config(schema, name, ["--help"])
    assert ("algorithm=dapo" in capsys.readouterr().out) == has_recipes


def test_cfg_prints_the_configuration(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        load("--cfg", "trainer.seed=9")
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["seed"] == 9


def test_a_saved_config_loads_again(tmp_path: Path):
    config = load("algorithm=dapo", "actor_rollout_ref.actor.optim.lr=3e-7", "data.train_files=[a,'ü b']")
    save_config(config, tmp_path / "run" / "config.yaml")
    assert build_config(Config, read_saved_config(tmp_path / "run")) == config
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]
    again = load("--config-dir", str(tmp_path / "run"), "--config-name", "config")
    assert again == config


def test_code_that_an_entry_of_a_saved_map_names_needs_the_command_line(tmp_path: Path):
    models = "teacher.models={a: {path: x/y, trust_remote_code: true}}"
    values = load(models, "teacher.by_source.x=a", "teacher.divergence=sampled")
    saved = SavedConfig(tmp_path, values.model_dump(mode="json"))
    key = "teacher.models.a.trust_remote_code"
    with pytest.raises(ConfigError, match=f"add {key}=true$"):
        load_config(Config, "ppo", [], saved)
    assert load_config(Config, "ppo", [f"{key}=true"], saved) == values


def test_reported_prints_one_message_and_exits_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped, exit_on_config_error():
        load("trainer.sede=1", "trainer.sed=1")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("2 errors in the configuration:\n  trainer.sede (got 1)")


def test_presets_of_a_yaml_file_and_values_that_a_preset_replaces(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [algorithm: dapo, _self_]\nenv:\n  rollout:\n    n: 8\n")
    config, user_settings = load_config_and_user_settings(Config, "ppo", ["--config", str(file)])
    assert (config.group_size, user_settings.presets, user_settings.notices) == (8, ("algorithm=dapo",), ())
    file.write_text("env:\n  rollout:\n    n: 8\n")
    config, user_settings = load_config_and_user_settings(Config, "ppo", ["--config", str(file), "algorithm=dapo"])
    assert (config.group_size, user_settings.presets) == (16, ("algorithm=dapo",))
    (notice,) = user_settings.notices
    assert notice.startswith("env.rollout.n=16 ") and " 8 " in notice
