"""docs/evolving.md: its commands, keys and roles exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alphaapollo.config.keys import list_keys, list_sections
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import EvolvingConfig, ServedModel
from alphaapollo.config.schema.generation import EvolvingRoles

PAGE = Path(__file__).parents[3] / "docs" / "evolving.md"
if not PAGE.exists():
    pytest.skip("an installed package has no docs folder", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def test_commands_are_accepted() -> None:
    (words,) = re.findall(r"python -m alphaapollo\.evolving\.main((?:[^\n]*\\\n)*[^\n]*)", TEXT)
    config = load_config(EvolvingConfig, "evolving", words.replace("\\\n", " ").split())
    assert config.models["policy"].path == "outputs/model" and config.evolving.votes == 3
    (server,) = re.findall(r"^    '(models=\{.*\})'", TEXT, re.MULTILINE)
    assert load_config(EvolvingConfig, "evolving", [server]).models["policy"].name == "Qwen/Qwen3-8B"


def test_keys_exist() -> None:
    known = {*list_keys(EvolvingConfig), *list_sections(EvolvingConfig)}
    named = re.findall(r"`((?:data|evolving|roles|budget|rollout|env|trainer)\.\w[\w.]*\w)", TEXT)
    of_slots = [key.replace("roles.SLOT.", "roles.verifier.") for key in named]
    assert len(named) > 15 and [key for key in of_slots if key not in known] == []
    table = TEXT.partition("| key of a model |")[2].partition("\n\n")[0]
    keys = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.count("|") > 2))
    assert set(keys) == set(ServedModel.model_fields)


def test_slots_exist() -> None:
    table = TEXT.partition("| slot |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(EvolvingRoles.model_fields)
