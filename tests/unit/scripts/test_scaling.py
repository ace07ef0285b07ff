"""docs/scaling.md is what the planner says."""

from __future__ import annotations

from scripts.scaling import PAGE, page


def test_the_table_is_up_to_date():
    text = PAGE.read_text()
    assert page(text) == text, "run scripts/scaling.py"
