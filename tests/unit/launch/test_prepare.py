"""Which steps of the preparation each command does: docs/architecture.md shows the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.finetuning.run import FinetuningPreparation
from alphaapollo.launch.inference import ChatPreparation, ServePreparation
from alphaapollo.launch.prepare import Preparation
from alphaapollo.own_loop.setup import LoopPreparation
from alphaapollo.trainer.evaluation.generation import GenerationPreparation
from alphaapollo.trainer.setup.preparation import RlPreparation

COMMANDS: dict[str, type[Preparation]] = {
    "main_ppo": RlPreparation,
    "Trainer": LoopPreparation,
    "fine-tuning": FinetuningPreparation,
    "generation": GenerationPreparation,
    "chat": ChatPreparation,
    "serve": ServePreparation,
}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"


def make_table() -> str:
    """Table of the steps and the commands that leave them out."""
    lines = ["| step | left out by |", "|---|---|"]
    for step in Preparation.STEPS:
        names = ", ".join(name for name, command in COMMANDS.items() if step in command.LEFT_OUT)
        lines.append(f"| `{step}` | {names} |")
    return "\n".join(lines)


def test_the_page_shows_the_steps_of_each_command() -> None:
    assert make_table() in PAGE.read_text(), f"put this table into {PAGE.name}:\n{make_table()}"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_each_step_is_done_or_left_out_with_a_reason(command: type[Preparation]) -> None:
    assert command.LEFT_OUT.keys() <= set(Preparation.STEPS)
    abstract = {"resolve_workers", "read_data", "check_teachers", "plan_memory"}
    done = {step for step in command.list_steps() if getattr(command, step) is getattr(Preparation, step)}
    assert not done & abstract
