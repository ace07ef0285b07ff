import re
from pathlib import Path

import pytest

from alphaapollo.config.__main__ import explain_key
from alphaapollo.config.key_tables import PROJECTS, find_key_status, load_project
from alphaapollo.config.key_tables import exists as key_exists
from alphaapollo.config.keys import COMMANDS, list_keys
from alphaapollo.config.schema import Config
from alphaapollo.config.verl import find_differences_from_verl

SEEN = Path(__file__).with_name("verl_keys_seen.txt")  # made by collect_verl_keys.py


def exists(key: str, command: str) -> bool:
    return key_exists(key, COMMANDS[command])


def named_keys(text: str, command: str) -> list[str]:
    tops = {key.split(".")[0] for key in list_keys(COMMANDS[command])}
    words = re.findall(r"\b([a-z_]+(?:\.[a-z_]\w*)+)", text)
    return [word for word in words if word.split(".")[0] in tops]


def program_meant(text: str, command: str) -> str:
    return next((other for other in COMMANDS if f"alphaapollo.trainer.{other}" in text), command)


def test_every_key_of_verls_scripts_is_answered():
    seen = [line.split() for line in SEEN.read_text(encoding="utf-8").splitlines()]
    assert len(seen) > 1500
    unanswered = [
        f"{command} {key}"
        for command, key in seen
        if not exists(key, command) and find_key_status("verl", key, COMMANDS[command]) is None
    ]
    assert unanswered == []


@pytest.mark.parametrize(("project", "command"), [(one, name) for one in PROJECTS for name in load_project(one).tables])
def test_hints_name_only_keys_that_exist(project: str, command: str):
    texts = {pattern: answer.status for pattern, answer in load_project(project).tables[command].answers.items()}
    wrong = {
        pattern: missing
        for pattern, verdict in texts.items()
        if (
            missing := [key for key in named_keys(verdict, command) if not exists(key, program_meant(verdict, command))]
        )
    }
    assert wrong == {}


def test_named_keys_are_found():
    found = named_keys("renamed to trainer.seed (not metrics.jsonl, reward.judge)", "main_ppo")
    assert found == ["trainer.seed", "reward.judge"]


@pytest.mark.parametrize("command", COMMANDS)
def test_only_accepted_keys_are_listed_as_differences(command: str):
    assert set(find_differences_from_verl(COMMANDS[command])) <= list_keys(COMMANDS[command]).keys()


def test_default_of_this_project_is_not_a_difference():
    keys = list_keys(Config)
    assert [
        key for key, value in load_project("verl").tables["main_ppo"].default.items() if keys[key].default == value
    ] == []


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        (f"{ACTOR}.veomni.fsdp_size", "not supported (FSDP2"),
        (f"{ACTOR}.veomni.expert_parallel_size", f"renamed to {ACTOR}.fsdp_config.ep_size"),
        ("critic.fsdp.turbo_config.distributed.expert_fully_shard_parallel_size", "not supported (FSDP2"),
        ("actor_rollout_ref.ref.mindspeed.expert_model_parallel_size", "not supported (the reference"),
        ("actor_rollout_ref.rollout.moe_tensor_parallel_size", "not supported (engines"),
        ("critic.megatron.tensor_model_parallel_size", "not supported (FSDP2"),
        ("critic.fsdp.param_offload", "renamed to critic.fsdp_config.param_offload"),
        (f"{ACTOR}.megatron.param_offload", f"renamed to {ACTOR}.fsdp_config."),
        ("reward.reward_kwargs.overlong_buffer_cfg.len", "renamed to algorithm.overlong_penalty.cache"),
        ("reward_model.reward_kwargs.max_resp_len", "dropped because it is data.max_response_length"),
        (f"{ACTOR}.optim.override_optimizer_config.x", "not supported (optimizers"),
        ("ray_kwargs.ray_init.num_cpus", "dropped because the run"),
        ("hydra.run.dir", "dropped because configurations"),
        ("model.path", "not supported (the section is actor_rollout_ref.model"),
        ("algorithm.gigpo.step_advantage_w", "renamed to algorithm.gigpo_step_weight"),
    ],
)
def test_families(key: str, verdict: str):
    found = find_key_status("verl", key, Config)
    assert found is not None and found.startswith(verdict)


def test_section_is_answered_with_its_replacement():
    assert find_key_status("verl", "ray_kwargs", Config) == find_key_status("verl", "ray_kwargs.x", Config)
    assert find_key_status("verl", "nothing.of.verls", Config) is None


def test_explain_lists_the_differences():
    assert "verl's default is -1" in explain_key("trainer.test_freq")
    assert "prompts in verl" in explain_key("actor_rollout_ref.actor.ppo_mini_batch_size")
