"""docs/evolving.md has every key of a model and every slot. Its other keys and its commands: tests of all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alphaapollo.plugins.evolving.settings import EvolvingRoles, ServedModel

PAGE = Path(__file__).parents[3] / "docs" / "evolving.md"


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs folder")
def test_tables_are_complete() -> None:
    def list_names(head: str) -> set[str]:
        """Names in the first column of the table with this head."""
        rows = PAGE.read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0].splitlines()[2:]
        return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}

    assert list_names("| key of a model |") == set(ServedModel.model_fields)
    assert list_names("| slot |") == set(EvolvingRoles.model_fields)
