"""Differences between two configurations of a run: applied, kept or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.config.changes import find_changes, find_resume_rule, identify_command
from alphaapollo.config.keys import COMMANDS, list_keys
from alphaapollo.config.schema import Config, DpoConfig, EvalConfig, GenerationConfig, RmConfig, SftConfig
from alphaapollo.config.schema.base import Section, Verdict
from alphaapollo.utils.plugins import find_own_plugins
from tests.unit.config.overrides import from_overrides

LORA = ("lora_rank", "lora_alpha", "target_modules")
FINETUNING = {f"model.{name}" for name in ("path", "tokenizer_path", "freeze_vision", *LORA)}
FINETUNING |= {"data.train_files", "data.system_prompt", "optim.name"}
PAIRS = FINETUNING | {f"data.{name}_key" for name in ("prompt", "chosen", "rejected")}
REFUSED: dict[type[Section], set[str]] = {
    Config: {
        *(f"actor_rollout_ref.model.{name}" for name in ("path", "tokenizer_path", "freeze_vision", *LORA)),
        *(f"critic.model.{name}" for name in ("path", *LORA)),
        *("algorithm.adv_estimator", "algorithm.custom_module", "actor_rollout_ref.actor.policy_loss.loss_mode"),
        *("actor_rollout_ref.actor.optim.name", "critic.optim.name"),
        *("data.train_files", "data.prompt_key", "data.system_prompt", "data.ground_truth_key"),
        *("env.env_name", "env.custom_module", "env.agent.path", "env.agent.command"),
    },
    SftConfig: FINETUNING | {f"data.{name}_key" for name in ("messages", "prompt", "response")} | {"data.train_turns"},
    DpoConfig: PAIRS | {"data.response_key", "data.label_key", "preference.loss", "preference.custom_module"},
    RmConfig: PAIRS | {"data.margin_key"},
}


def keys_with(schema: type[Section], verdict: Verdict) -> set[str]:
    config, sections = schema(), tuple(f"{name}." for name in find_own_plugins("sections"))
    keys = {name: key for name, key in list_keys(schema).items() if not name.startswith(sections)}
    return {name for name, key in keys.items() if find_resume_rule(config, key).verdict == verdict}


@pytest.mark.parametrize("schema", REFUSED, ids=lambda schema: schema.__name__)
def test_the_identity_of_a_run(schema: type[Section]) -> None:
    assert keys_with(schema, "refused") == REFUSED[schema]
    assert keys_with(schema, "kept") == ({"trainer.val_before_train"} if schema is Config else set())
    names = ("resume_mode", "resume_from_path", "resume_with_other_data", "dry_run", "planned_device")
    starts = {f"trainer.{name}" for name in names}
    assert keys_with(schema, "ignored") == starts


@pytest.mark.parametrize(
    ("command", "verdict", "keys"),
    [
        ("main_generation", "applied", "data.path rollout.num_engines trainer.n_gpus_per_node"),
        ("main_generation", "applied", "reward.judge.timeout env.episode_timeout"),
        ("main_generation", "refused", "data.n_samples rollout.top_p rollout.engine_kwargs.vllm"),
        ("main_generation", "refused", "trainer.seed reward.judge.model"),
    ],
)
def test_what_determines_requests_must_not_change(command: str, verdict: str, keys: str) -> None:
    assert set(keys.split()) <= keys_with(COMMANDS[command], verdict)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        "trainer.seed: 0 -> 1: applied",
        "trainer.val_before_train: true -> false: kept (",
    ],
)
def test_change_is_reported_as_applied_kept_or_refused(line: str) -> None:
    key, values, _ = line.split(": ")
    new = values.partition(" -> ")[2]
    (change,) = find_changes(Config().model_dump(mode="json"), from_overrides(Config, f"{key}={new}"))
    assert str(change).startswith(line)


def test_a_controller_keeps_the_coefficient_of_the_checkpoint() -> None:
    saved = Config().model_dump(mode="json")
    for kind, verdict in (("fixed", "applied"), ("dual", "kept")):
        now = Config(algorithm={"kl_ctrl": {"type": kind, "kl_coef": 0.2}})
        found = {change.key: change.verdict for change in find_changes(saved, now)}
        assert found["algorithm.kl_ctrl.kl_coef"] == verdict


def test_resume_keys_and_spelling_of_paths_are_no_difference() -> None:
    saved = SftConfig(data={"train_files": "a/b.parquet"}).model_dump(mode="json")
    now = SftConfig(
        data={"train_files": [str(Path("a/../a/b.parquet").absolute())]},
        trainer={"experiment_name": "sft", "resume_mode": "resume_path", "resume_from_path": "x", "dry_run": True},
    )
    assert find_changes(saved, now) == []


def test_a_file_of_another_version_has_defaults_for_new_keys_and_may_have_old_ones() -> None:
    saved = SftConfig(grad_clip=2.0).model_dump(mode="json") | {"gone": {"key": 1}}
    del saved["optim"]["betas"], saved["trainer"]["seed"]
    now = SftConfig(grad_clip=2.0, trainer={"experiment_name": "sft", "seed": 3})
    assert [change.key for change in find_changes(saved, now)] == ["trainer.seed"]


def test_the_command_is_known_by_its_sections() -> None:
    commands = {"main_ppo": Config, "main_sft": SftConfig, "main_generation": GenerationConfig, "main_eval": EvalConfig}
    for command, schema in commands.items():
        assert identify_command(schema().model_dump(mode="json")) == command
    assert identify_command({"data": {}}) is None
