"""The grader of code where runs use it: the check of ground truths before the start, and the rollout worker."""

from __future__ import annotations

import json

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.planning.trials import try_ground_truths
from alphaapollo.plugins.code_grader.grader import extract_code
from tests.unit.planning.test_try_data import make_prompts
from tests.unit.rewards.test_hostile_texts import READERS, TEXTS, is_linear
from tests.unit.rollout.conftest import folder as folder

TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


def test_tests_that_can_be_read_are_ground_truths() -> None:
    prompts = make_prompts("code", json.dumps(TESTS), TESTS, {"asserts": ["assert f(2) == 4"]})
    found, notices = try_ground_truths(prompts, Reward())
    assert notices == [] and [*found] == ["code"]


def test_the_time_of_reading_an_answer_is_linear_in_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, "code", extract_code)
    assert [text for text in TEXTS if not is_linear("code", text)] == []
