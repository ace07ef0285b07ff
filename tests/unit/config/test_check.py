"""Errors and warnings about combinations of keys, about files, and about the machine."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaapollo.config.build import build_config
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import COMMANDS
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, GenerationConfig, RunFolder, SftConfig, Teacher
from alphaapollo.controller.placement import Machine, make_placement
from tests.unit.config.overrides import from_overrides

COMBINATIONS = yaml.safe_load(Path(__file__).with_name("combinations.yaml").read_text(encoding="utf-8"))
TEACHERS = "teacher.models.math.path=a teacher.models.code.base_url=http://h/v1 teacher.models.code.name=b"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    for name in ("train.jsonl", "val.jsonl", "own.py"):
        (tmp_path / name).touch()
    return tmp_path


def expand(command: str, words: str) -> list[str]:
    prefix = "actor_rollout_ref." if command == "ppo" else ""
    return re.sub(r"(?<![\w.])(actor|rollout|ref|model)\.", rf"{prefix}\1.", words).split()


def outcome(command: str, words: str = "") -> list[str]:
    """Warnings about a configuration with the required keys and `words`."""
    machine = {"gpus": 0, "cores": 8}
    overrides = expand(command, COMBINATIONS["required"][command])
    for word in expand(command, words):
        key, _, value = word.partition("=")
        if key in machine:
            machine[key] = int(value)
        else:
            overrides.append(word)
    schema = COMMANDS[command if command in COMMANDS else f"main_{command}"]
    return check_config_and_get_notices(from_overrides(schema, *overrides), *machine.values())


def problem(command: str, words: str) -> str:
    """The only error about a configuration."""
    with pytest.raises(ConfigError) as caught:
        outcome(command, words)
    (text,) = caught.value.errors
    assert text.endswith(".")
    return text


def rows(table: dict[str, dict[str, str]]) -> list[Any]:
    return [
        pytest.param(command, *row, id=f"{command} {row[0]}") for command in table for row in table[command].items()
    ]


@pytest.mark.parametrize(("command", "words", "facts"), rows(COMBINATIONS["errors"]))
def test_an_error_names_the_keys_and_values(command: str, words: str, facts: str):
    text = problem(command, words)
    assert [fact for fact in expand(command, facts) if fact not in text] == [], text


def test_adamw_8bit_needs_torchao(monkeypatch: pytest.MonkeyPatch):
    outcome("ppo", "actor.optim.name=adamw_8bit")
    monkeypatch.setitem(sys.modules, "torchao", None)
    for command, section in (("ppo", "actor."), ("sft", "")):
        assert f"{section}optim.name=adamw_8bit: torchao is not installed" in problem(
            command, f"{section}optim.name=adamw_8bit"
        )


def test_model_and_data_are_required():
    for config, keys in (
        (Config(), ["data.train_files", "actor_rollout_ref.model.path"]),
        (GenerationConfig(), ["data.path", "model.path"]),
    ):
        with pytest.raises(ConfigError) as caught:
            check_config_and_get_notices(config)
        assert [text.partition(" is required")[0].partition("=")[0] for text in caught.value.errors] == keys


def test_every_problem_is_named_at_once():
    for words in (
        "rollout.top_p=0.0 actor.clip_ratio_c=0.5",
        "trainer.n_gpus_per_node=4 critic.fsdp_config.fsdp_size=3 algorithm.filter_groups.enable=true",
    ):
        with pytest.raises(ConfigError) as caught:
            outcome("ppo", words)
        assert len(caught.value.errors) == 2


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"experiment_name": ""}, "trainer.experiment_name=''"),
        ({"experiment_name": "../../escape"}, "../../escape trainer.output_dir"),
        ({"experiment_name": "grpo/lr1"}, "trainer.experiment_name=grpo/lr1 /"),
        ({"experiment_name": "a\0b"}, "trainer.experiment_name"),
        ({"output_dir": "y" * 300}, "trainer.output_dir=yyyy"),
    ],
)
def test_names_of_run_folders(keys: dict[str, Any], facts: str):
    with pytest.raises(ConfigError) as caught:
        build_config(SftConfig, {"trainer": keys})
    assert [fact for fact in facts.split() if fact not in str(caught.value)] == []


@pytest.mark.parametrize(("command", "words", "facts"), rows(COMBINATIONS["without_effect"]))
def test_a_key_without_effect_is_a_warning_with_its_reason(command: str, words: str, facts: str):
    (line,) = outcome(command, words)
    key, _, reason = line.partition(" has no effect: ")
    assert key == expand(command, words)[0].replace('"', "")
    assert [fact for fact in expand(command, facts) if fact not in reason] == [], reason


@pytest.mark.parametrize(
    ("command", "words"), [(command, words) for command, valid in COMBINATIONS["valid"].items() for words in valid]
)
def test_what_works_has_no_warning(command: str, words: str):
    assert outcome(command, words) == []


@pytest.mark.parametrize(("words", "facts"), COMBINATIONS["warnings"].items())
def test_warnings_about_likely_mistakes(words: str, facts: str):
    (line,) = outcome("ppo", words)
    assert [fact for fact in expand("ppo", facts) if fact not in line] == [], line


@pytest.mark.parametrize(
    ("kind", "read"),
    [("fixed", []), ("adaptive", ["target_kl", "horizon"]), ("doubling", ["target_kl"]), ("dual", ["target_kl"])],
)
def test_each_kl_controller_reads_its_own_keys(kind: str, read: list[str]):
    keys = f"algorithm.kl_ctrl.type={kind} algorithm.kl_ctrl.target_kl=3.0 algorithm.kl_ctrl.horizon=50.0"
    lines = outcome("ppo", f"algorithm.use_kl_in_reward=true {keys}")
    found = [
        re.match(r"algorithm\.kl_ctrl\.(\w+)=[\d.]+ has no effect: algorithm.kl_ctrl.type ", line) for line in lines
    ]
    assert [match and match[1] for match in found] == [name for name in ("target_kl", "horizon") if name not in read]
    off = outcome("ppo", f"algorithm.kl_penalty=k3 {keys}")
    assert all("algorithm.use_kl_in_reward is false" in line for line in off)
    assert len(off) == 3 + (kind != "fixed")


def test_the_first_matching_pattern_chooses_the_teachers_of_a_data_source():
    by_source = "teacher.by_source={OpenAI/gsm8k: math, '*gsm8k': {math: 0.25, code: 0.75}}"
    teacher = from_overrides(Config, *TEACHERS.split(), by_source, "teacher.divergence=sampled").teacher
    assert teacher.find_shares("openai/gsm8k") == [1.0, 0.0]
    assert teacher.find_shares("my-GSM8K") == [0.25, 0.75]
    assert teacher.find_shares("apps") == [0.0, 0.0]
    assert list(teacher.local_models) == ["teacher.models.math"] and list(teacher.servers) == ["teacher.models.code"]
    assert Teacher(divergence="sampled", model={"path": "a"}).find_shares("apps") == [1.0]
    assert not Teacher().models_by_key


@pytest.mark.parametrize(
    "words",
    ["rollout.n=4", "+rollout.n=4", "env.rollout.n=4", "env.rollout.n=4 rollout.n=4", "env.rollout.n=4 rollout.n=1"],
)
def test_the_group_size_has_two_names(words: str):
    assert load_config(Config, "ppo", expand("ppo", words)).group_size == 4


def test_a_stall_is_reported_before_its_timeout():
    assert RunFolder(experiment_name="a").folder.name == "a"
    for timeout, notice in ((600.0, 60.0), (3600.0, 60.0), (None, 60.0), (100.0, 10.0)):
        trainer = build_config(SftConfig, {"trainer": {"stall_timeout": timeout}}).trainer
        assert trainer.stall_notice_seconds == notice


@pytest.mark.parametrize(("mode", "threads"), [("carry", 8), ("separate", 6)])
def test_separate_engines_have_their_own_cores(mode: str, threads: int):
    config = from_overrides(Config, "algorithm.rollout_correction.method=tis", f"trainer.async_mode={mode}")
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"num_engines": 2})
    assert make_placement(config, rollout, "cpu", Machine(8, 0), has_critic=False).threads == threads
