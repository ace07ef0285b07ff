"""docs/preferences.md and docs/reward_models.md name only existing commands, keys and examples."""

import re
from pathlib import Path

import pytest

from alphaapollo.config.keys import COMMANDS, list_keys
from examples.preferences.make_pairs import CARRY, right

DOCS = Path(__file__).parents[3] / "docs"
if not DOCS.exists():
    pytest.skip("an installed package has no docs folder", allow_module_level=True)


@pytest.mark.parametrize(("page", "command"), [("preferences.md", "main_dpo"), ("reward_models.md", "main_rm")])
def test_the_commands_and_keys_of_the_pages_exist(page: str, command: str) -> None:
    text, known = (DOCS / page).read_text(encoding="utf-8"), list_keys(COMMANDS[command]).keys()
    ((name, words),) = re.findall(r"python -m alphaapollo\.trainer\.(\w+)((?:[^\n]*\\\n)*[^\n]*)", text)
    keys = re.findall(r"([\w.]+)=", words)
    assert name == command and len(keys) > 3 and {*keys} <= known
    named = re.findall(r"`((?:data|preference|bradley_terry|optim|trainer)\.\w+)", text)
    assert len(named) >= 3 and not {*named} - known


def test_the_examples_pairs_are_named_by_their_carries() -> None:
    texts = {(123, 456): 0, (125, 416): 1, (185, 416): 2, (501, 111): 0}
    assert {pair: len(CARRY.findall(right(*pair))) for pair in texts} == texts
