from __future__ import annotations

from pathlib import Path

from alphaapollo.config.diff import Verdict, command_of, find_changes
from alphaapollo.config.schema import Config, EvalConfig, GenerationConfig, SftConfig


def change_rule(key: str) -> tuple[Verdict, str]:
    return ("kept", "the moments stay") if key.endswith("betas") else ("applied", "")


def test_every_key_that_differs_is_found_with_what_becomes_of_it() -> None:
    saved = SftConfig().model_dump(mode="json")
    now = SftConfig(optim={"lr": 1e-3, "betas": (0.9, 0.95)}, trainer={"logger": ["console", "wandb"]})
    assert list(map(str, find_changes(saved, now, change_rule))) == [
        "optim.lr: 1e-05 -> 0.001: applied",
        "optim.betas: [0.9,0.999] -> [0.9,0.95]: kept (the moments stay)",
        "trainer.logger: [console] -> [console,wandb]: applied",
    ]


def test_how_a_start_is_asked_for_and_how_files_are_spelled_is_no_difference() -> None:
    saved = SftConfig(data={"train_files": "a/b.parquet"}).model_dump(mode="json")
    now = SftConfig(
        data={"train_files": [str(Path("a/../a/b.parquet").absolute())]},
        trainer={"resume_mode": "resume_path", "resume_from_path": "x", "dry_run": True},
    )
    assert find_changes(saved, now, change_rule) == []


def test_a_file_of_another_version_has_defaults_for_new_keys_and_may_have_old_ones() -> None:
    saved = SftConfig(grad_clip=2.0).model_dump(mode="json") | {"gone": {"key": 1}}
    del saved["optim"]["betas"], saved["trainer"]["seed"]
    now = SftConfig(grad_clip=2.0, trainer={"seed": 3})
    assert list(map(str, find_changes(saved, now, change_rule))) == ["trainer.seed: 0 -> 3: applied"]


def test_the_command_is_told_by_the_sections() -> None:
    commands = {"main_ppo": Config, "main_sft": SftConfig, "main_generation": GenerationConfig, "main_eval": EvalConfig}
    for command, schema in commands.items():
        assert command_of(schema().model_dump(mode="json")) == command
    assert command_of({"data": {}}) is None
