"""Keys and options of other projects: each is accepted, renamed or explained, by tables that name keys that exist."""

import re
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import yaml

from alphaapollo.config.key_tables import PROJECTS, exists, find_answer, find_key_status, load_project
from alphaapollo.config.keys import COMMANDS, list_keys, list_sections
from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.schema import Config
from alphaapollo.config.verl import find_differences_from_verl, find_values_meant_for_verl
from tests.page_commands import NEEDS_PLUGINS

ROOT = Path(__file__).resolve().parents[3]
ACTOR = "actor_rollout_ref.actor"
PROJECT_COMMANDS = [(project, command) for project in PROJECTS for command in load_project(project).tables]
VERDICT = re.compile(r"renamed to \S+|converted to \S+|dropped because .{5,}|not supported \(.{5,}\)")


@pytest.mark.parametrize(("project", "command"), PROJECT_COMMANDS)
def test_every_option_of_a_table_is_renamed_or_explained(project: str, command: str):
    """The pages list the options, too: an entry that disappears is a page that is not current (test_keys.py)."""
    answers = load_project(project).tables[command].answers
    assert answers
    for option, answer in answers.items():
        name = re.sub(r"\[(.).*?\]", r"\1", option.removesuffix(".*")).replace("*", "any")
        found = find_answer(project, name, COMMANDS[command])
        assert found == answer if name == option else found, option
        assert VERDICT.match(answer.status), option
        assert answer.key or answer.cases or answer.remark, option


@pytest.mark.parametrize(("project", "command"), PROJECT_COMMANDS)
def test_tables_lead_to_accepted_keys(project: str, command: str):
    table, schema = load_project(project).tables[command], COMMANDS[command]
    ours = {key for answer in table.answers.values() for words in answer.cases.values() for key in words}
    ours |= {answer.key for answer in table.answers.values() if answer.key} | table.computed.keys()
    assert ours and [key for key in ours if not exists(key, schema)] == []
    if project != "verl":  # whose defaults are by keys that both projects have
        assert table.default.keys() <= table.answers.keys()
        assert {other for other, *_ in table.default_requires.values()} <= table.answers.keys()


def named_keys(text: str, command: str) -> list[str]:
    tops = {key.split(".")[0] for key in list_keys(COMMANDS[command])}
    words = re.findall(r"\b([a-z_]+(?:\.[a-z_]\w*)+)", text)
    return [word for word in words if word.split(".")[0] in tops]


@pytest.mark.parametrize(("project", "command"), PROJECT_COMMANDS)
def test_hints_name_only_keys_that_exist(project: str, command: str):
    for option, answer in load_project(project).tables[command].answers.items():
        meant = next((other for other in COMMANDS if f"alphaapollo.trainer.{other}" in answer.status), command)
        missing = [key for key in named_keys(answer.status, command) if not exists(key, COMMANDS[meant])]
        assert missing == [], option
    found = named_keys("renamed to trainer.seed (not metrics.jsonl, reward.judge)", "main_ppo")
    assert found == ["trainer.seed", "reward.judge"]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_accepted_key_is_reported_as_missing(command: str):
    schema = COMMANDS[command]
    entries = [entry for entry in load_project("verl").tables[command].answers if "*" not in entry.removesuffix(".*")]
    assert [entry for entry in entries if entry in list_keys(schema)] == []
    assert [entry for entry in entries if entry.removesuffix(".*") in list_sections(schema)] == []


@pytest.mark.parametrize("file", [*PROJECTS, "transformers"])
def test_no_key_is_listed_twice(file: str):
    text = resources.files("alphaapollo.config").joinpath(f"{file}_keys.yaml").read_text(encoding="utf-8")
    sections = [(name.value, tables) for name, tables in yaml.compose(text).value]
    for command, tables in sections:
        if command != "shared" and command not in COMMANDS:
            continue
        nodes = {table.value: entries.value for table, entries in tables.value}
        names = [key.value for table in ("renamed", "cases") for key, _ in nodes.get(table, [])]
        for table in ("dropped", "not_supported"):
            names += [key.value for _, keys in nodes.get(table, []) for key in keys.value]
        assert [name for name, count in Counter(names).items() if count > 1] == [], command


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        (f"{ACTOR}.veomni.fsdp_size", "not supported (FSDP2"),
        ("critic.fsdp.turbo_config.distributed.expert_fully_shard_parallel_size", "not supported (FSDP2"),
        ("actor_rollout_ref.ref.mindspeed.expert_model_parallel_size", "not supported (the reference"),
        ("actor_rollout_ref.rollout.moe_tensor_parallel_size", "not supported (engines"),
        ("critic.fsdp.param_offload", "renamed to critic.fsdp_config.param_offload"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len", "renamed to algorithm.overlong_penalty.cache"),
        ("reward_model.reward_kwargs.max_resp_len", "dropped because it is data.max_response_length"),
        (f"{ACTOR}.optim.override_optimizer_config.x", "not supported (optimizers"),
        ("ray_kwargs", "dropped because the run"),  # the section, too
        ("model.path", "not supported (the section is actor_rollout_ref.model"),
        ("algorithm.gigpo.step_advantage_w", "renamed to algorithm.gigpo_step_weight"),
        ("nothing.of.verls", "None"),
    ],
)
def test_longest_pattern_answers_a_key_of_verl(key: str, verdict: str):
    assert str(find_key_status("verl", key, Config)).startswith(verdict)


@pytest.mark.parametrize("command", COMMANDS)
def test_only_accepted_keys_are_listed_as_differences(command: str):
    assert set(find_differences_from_verl(COMMANDS[command])) <= list_keys(COMMANDS[command]).keys()


def test_default_of_this_project_is_not_a_difference():
    defaults = load_project("verl").tables["main_ppo"].default
    assert [key for key, value in defaults.items() if list_keys(Config)[key].default == value] == []


def notices(*argv: str) -> list[str]:
    config, user_settings = load_config_and_user_settings(Config, "ppo", argv)
    return list(find_values_meant_for_verl(config, user_settings.keys))


def test_a_mini_batch_of_prompts_is_noticed():
    prompts, key = ["data.train_batch_size=1024", "actor_rollout_ref.rollout.n=5"], f"{ACTOR}.ppo_mini_batch_size"
    (line,) = notices(*prompts, f"{key}=256")
    assert "20 optimizer steps" in line  # 5120 / 256
    assert "256 prompts x 5" in line and "1280" in line
    assert len(notices(*prompts, f"{key}=1024")) == 1
    assert notices(*prompts, f"{key}=1280") == []  # more than the prompts: it can only be trajectories
    assert notices(*prompts) == []  # not set by the user
    assert notices("data.train_batch_size=1024", f"{key}=256") == []  # one sample a prompt: the same


@NEEDS_PLUGINS
def test_example_configurations_get_no_warning():
    files = [file for file in (ROOT / "examples").glob("*/*.yaml") if "actor_rollout_ref:" in file.read_text()]
    assert len(files) > 10
    for file in files:
        assert notices("--config-dir", str(file.parent), "--config-name", file.stem) == [], file
