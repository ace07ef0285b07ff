"""The grader of code where runs use it: the check of ground truths before the start, and the rollout worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.planning.trials import try_ground_truths
from alphaapollo.plugins.code_grader.grader import extract_code
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling
from tests.unit.planning.test_try_data import make_prompts
from tests.unit.rewards.test_hostile_texts import READERS, TEXTS, is_linear
from tests.unit.rollout.conftest import folder as folder
from tests.unit.rollout.worker_kit import TextEngine, generate, make_worker

TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


def test_tests_that_can_be_read_are_ground_truths() -> None:
    prompts = make_prompts("code", json.dumps(TESTS), TESTS, {"asserts": ["assert f(2) == 4"]})
    found, notices = try_ground_truths(prompts, Reward())
    assert notices == [] and [*found] == ["code"]


def test_the_time_of_reading_an_answer_is_linear_in_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, "code", extract_code)
    assert [text for text in TEXTS if not is_linear("code", text)] == []


PROGRAMS = [
    ("print(4)", ""),
    ("while True: pass", "timeout"),
    ("while True: print('x' * 1000000)", "output"),
    ("x = bytearray(1 << 34)", "memory"),
    ("import os\nos.kill(os.getppid(), 9)", "error"),
]


def test_hostile_programs_fail_their_tests(folder: Path) -> None:
    """An error of the model's code is not a failure of the tool."""
    truth = json.dumps({"inputs": [""], "outputs": ["4\n"], "time_limit": 1})
    chats = [[Message(role="user", content=f"program {number}")] for number in range(len(PROGRAMS))]
    prompts = [Prompt(number, "code", chat, ground_truth=truth) for number, chat in enumerate(chats)]

    def write(text: str) -> str:
        return f"```python\n{PROGRAMS[int(text.split('program ')[1][0])][0]}\n```"

    worker = make_worker(folder, TextEngine(folder, write), max_prompt_length=2000, max_response_length=400)
    groups = generate(worker, *(GroupRequest(prompt, 1, Sampling(400), stream_position=0) for prompt in prompts))
    scores = [group.trajectories[0].score for group in groups]
    assert [(score.outcome, score.reward) for score in scores] == [("scored", 1.0)] + [("scored", 0.0)] * 4
    for score, (_, end) in list(zip(scores, PROGRAMS, strict=True))[1:]:
        assert f"the code ends with {end}" in score.reason
