"""The table of the largest base models in docs/lora.md."""

from __future__ import annotations

import pytest

from scripts import largest_base


@pytest.mark.nightly
def test_the_page_agrees_with_the_memory_plan() -> None:
    text = largest_base.PAGE.read_text()
    assert largest_base.page(text) == text, "run python -m scripts.largest_base --write"
