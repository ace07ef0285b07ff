from __future__ import annotations

from typing import Any

import pytest

from alphaapollo.config.keys import format_override
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config

TEXTS = [
    "",
    "a b",
    "it's",
    "a\\",
    "\\'x",
    "c=1,d",
    "1e5",
    "true",
    "null",
    "ü\n2",
    'say "hi"',
    "{a}",
    "[a]",
    "\\\\",
    "#x",
]


@pytest.mark.parametrize("value", [*TEXTS, TEXTS[1:], ["a,b"]], ids=repr)
def test_a_word_is_read_back_as_its_value(value: Any) -> None:
    assert load_config(Config, "ppo", [format_override("data.train_files", value)]).data.train_files == value


def test_other_values() -> None:
    assert format_override("a", None) == "a=null"
    assert format_override("a", True) == "a=true"
    assert format_override("a", 1e-6) == "a=1e-06"
    assert format_override("a.b", {"c": [1, "d"]}) == "a.b={c:[1,'d']}"
