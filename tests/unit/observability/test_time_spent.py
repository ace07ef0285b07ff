from __future__ import annotations

import re

import pytest

from alphaapollo.config.keys import list_keys
from alphaapollo.config.schema import Config
from alphaapollo.observability.time_spent import SUGGESTIONS, TimeSummary


def test_time_summary() -> None:
    spent = TimeSummary()
    assert spent.format_lines() == []
    spent.add({"timing/start": 10.0, "timing/validate": 2.0, "timing/step": 2.0, "val/accuracy": 0.5})
    for _ in range(2):
        spent.add({"timing/generate": 5.0, "timing/update": 3.0, "timing/other": 1.0, "timing/step": 9.0})
    shares, suggestion = spent.format_lines()
    assert shares == "time: start 33%, generate 33%, update 20%, validate 7%, other 7% of 30.0 s"
    assert suggestion.startswith("to speed up: a larger actor_rollout_ref.rollout.num_engines")
    assert suggestion.endswith("(generate takes 50%)")


@pytest.mark.parametrize(
    ("seconds", "phase"),
    [
        ({"update": 5, "generate": 4, "other": 1}, "update"),
        ({"other": 8, "publish": 2}, "publish"),
        ({"start": 10, "other": 7, "checkpoint": 2, "validate": 1}, "checkpoint"),
        ({"start": 14, "other": 4.2, "generate": 1, "update": 0.4, "validate": 0.4}, ""),
    ],
)
def test_suggestion_is_about_the_largest_phase_that_a_key_can_shorten(seconds: dict[str, float], phase: str) -> None:
    spent = TimeSummary()
    spent.add({f"timing/{name}": value for name, value in seconds.items()})
    _, *suggestions = spent.format_lines()
    assert [f"({phase} takes" in line for line in suggestions] == ([True] if phase else [])


def test_suggested_keys_exist() -> None:
    known = list_keys(Config)
    for _, suggestion in SUGGESTIONS.values():
        named = re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+", suggestion)
        assert named and all(name in known for name in named)
