"""Choice of the tests of a pull request."""

from __future__ import annotations

import pytest

from scripts.changed_tests import PAGES, choose_tests
from tests.conftest import HERE


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        (["docs/a.md", "README.md", "docs/images/b.svg"], [PAGES]),
        (
            ["alphaapollo/plugins/gguf/read.py", "tests/plugins/mcp/test_a.py"],
            ["tests/plugins/gguf", "tests/plugins/mcp"],
        ),
        (["alphaapollo/plugins/gguf/read.py", "docs/a.md"], [PAGES, "tests/plugins/gguf"]),
        (["alphaapollo/plugins/__init__.py"], []),
        (["docs/a.md", "alphaapollo/trainer/loop.py"], []),
    ],
)
def test_choice(changed: list[str], chosen: list[str]) -> None:
    assert choose_tests(changed) == chosen
    assert (HERE.parent / PAGES).is_file()
