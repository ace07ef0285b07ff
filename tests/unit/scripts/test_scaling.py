"""docs/scaling.md agrees with the memory plan."""

from __future__ import annotations

from scripts.scaling import PAGE, page


def test_the_table_is_up_to_date():
    text = PAGE.read_text()
    assert page(text) == text, "run scripts/scaling.py"
