"""The teacher of examples/reasoning_gym matches the environment, and its configurations are valid."""

import random
from collections import Counter

import pytest

from examples.reasoning_gym import teacher as puzzle_teacher
from tests.unit.environments import test_examples
from tests.unit.environments.test_examples import config

pytest.importorskip("reasoning_gym")


def test_configs_are_valid():
    test_examples.test_configs_are_valid("reasoning_gym")


def test_reasoning_gym_teacher_matches_the_environment():
    settings = config("reasoning_gym").env.reasoning_gym
    assert settings.settings == puzzle_teacher.TASKS and settings.tasks == list(puzzle_teacher.TASKS)
    puzzles = list(puzzle_teacher.puzzles(seed=0, count=50))
    assert {puzzle["question"][:5] for puzzle in puzzles} == {"State", "Solve"}
    rng = random.Random(0)
    said = Counter(puzzle_teacher.answer((4, 7), "-", rng) for _ in range(4000))
    right, wrong = "<think>4 - 7 is 4-7</think><answer>-3</answer>", "<think>4 - 7 is 4+7</think><answer>11</answer>"
    assert said.keys() == {right, wrong} and said[right] / 4000 == pytest.approx(puzzle_teacher.RIGHT, abs=0.03)
    for meant, result in (("+", 11), ("*", 28)):
        always = {puzzle_teacher.answer((4, 7), meant, rng) for _ in range(50)}
        assert always == {f"<think>4 {meant} 7 is 4{meant}7</think><answer>{result}</answer>"}
