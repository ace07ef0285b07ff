"""What becomes of each key that changes when a run goes on, and why: change_rules.txt, so that a new key gets its
verdict from a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alphaapollo.config.diff import OF_THE_START, ChangeRule, Verdict
from pydantic import BaseModel

from alphaapollo.config.keys import accepted_keys
from alphaapollo.config.schema import Config, DpoConfig, EvolvingConfig, GenerationConfig, RmConfig, SftConfig
from alphaapollo.evaluation.generation import change_rule as of_generation
from alphaapollo.evolving.run import change_rule as of_evolving
from alphaapollo.finetuning import dpo, reward_model, sft
from alphaapollo.trainer.setup import resume_rule

LISTING = Path(__file__).with_name("change_rules.txt")
RULES: dict[str, tuple[type[BaseModel], ChangeRule]] = {
    "main_ppo": (Config, resume_rule.change_rule_of(Config())),
    "main_sft": (SftConfig, sft.SftTask().change_rule),
    "main_dpo": (DpoConfig, dpo.DpoTask().change_rule),
    "main_rm": (RmConfig, reward_model.RewardModelTask().change_rule),
    "main_generation": (GenerationConfig, of_generation),
    "evolving": (EvolvingConfig, of_evolving),
}


def listing() -> Iterator[str]:
    for command, (schema, rule) in RULES.items():
        for key in accepted_keys(schema):
            if key not in OF_THE_START:
                verdict, why = rule(key)
                yield f"{command} {key}: {verdict}{f' ({why})' if why else ''}"


def test_every_key_has_the_verdict_that_was_written_down_for_it() -> None:
    found, written = list(listing()), LISTING.read_text().splitlines()
    new, gone = sorted({*found} - {*written}), sorted({*written} - {*found})
    assert (new, gone) == ([], []), f"decide in the command's rule what becomes of these, and say so in {LISTING}"


@pytest.mark.parametrize(
    ("schema", "tables"),
    [
        (Config, (resume_rule.IDENTITY, resume_rule.EFFECTS)),
        (SftConfig, (sft.IDENTITY, sft.EFFECTS)),
        (DpoConfig, (dpo.IDENTITY, dpo.EFFECTS)),
        (RmConfig, (reward_model.IDENTITY, reward_model.EFFECTS)),
    ],
)
def test_the_rules_name_keys_that_exist(schema: type[BaseModel], tables: tuple[dict[str, str], ...]) -> None:
    named = [key for table in tables for key in table]
    assert not {*named} - accepted_keys(schema).keys() and len({*named}) == len(named)


@pytest.mark.parametrize("command", [name for name in RULES if name != "evolving"])  # which names models in a map
def test_model_and_data_are_what_a_run_is(command: str) -> None:
    schema, rule = RULES[command]
    is_identity = (
        "model.path",
        "tokenizer_path",
        "lora_rank",
        "train_files",
        "data.path",
        "prompt_key",
        "adv_estimator",
    )
    others = ("reward_model", "teacher")  # which may change
    own = [key for key in accepted_keys(schema) if key.endswith(is_identity) and not key.startswith(others)]
    verdicts: dict[str, Verdict] = {key: rule(key)[0] for key in own if key not in ("data.path", "data.prompt_key")}
    assert len(verdicts) >= 3 and {*verdicts.values()} == {"refused"}
