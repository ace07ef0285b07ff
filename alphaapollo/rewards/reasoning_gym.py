"""Grader of reasoning-gym tasks: the package scores the answer, without executing it.

Some scorers of the package call `eval` on the answer. It is replaced by `ast.literal_eval`, which reads the lists that
they expect. Other scorers pass the answer to sympy's parser, which evaluates it, so they receive plain arithmetic only.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from functools import lru_cache
from typing import Any

import reasoning_gym

from alphaapollo.rewards.base import score_wrong_format
from alphaapollo.tools.reasoning_gym_data import make_dataset
from alphaapollo.types import Prompt, Score

EXTRA = "reasoning_gym"
"""Entry of `Prompt.extra_info` with the puzzle: {task, level, settings, entry}."""

EVAL_MODULES = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
SYMPY_TASKS = frozenset(
    {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
)
FUNCTIONS = re.compile(r"a?(sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|pi|Abs|[A-Za-z]")
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
PLAIN = re.compile(r"[\w\s+\-*/^().,]*", re.ASCII)
MAX_EXPRESSION = 500  # characters

for name in EVAL_MODULES:
    vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval


def grade(prompt: Prompt, completion: str) -> Score:
    """Return the package's score of the last <answer>...</answer>, from 0 to 1. `accuracy` is 1 for a score of 1.

    A completion has the wrong format if it has no answer, or if the scorer raises for its answer but not for the right
    answer. Raises ValueError if the prompt has no reasoning-gym puzzle.
    """
    puzzle = prompt.extra_info.get(EXTRA)
    if puzzle is None:
        raise ValueError(f"row {prompt.id} has no puzzle. Set env.env_name=reasoning_gym, which creates it.")
    answer = reasoning_gym.utils.extract_answer(completion)
    if answer is None:
        return score_wrong_format("no <answer>...</answer>")
    task = puzzle["task"]
    dataset = _load_scorer(task, puzzle["level"], json.dumps(puzzle["settings"]))
    if task in SYMPY_TASKS and not is_plain_arithmetic(answer):
        answer = ""
    try:
        reward = float(dataset.score_answer(answer, puzzle["entry"]))
    except Exception as error:  # noqa: BLE001  many scorers raise for an answer that they cannot read
        dataset.score_answer(puzzle["entry"]["answer"], puzzle["entry"])  # raises if the scorer itself is broken
        return score_wrong_format(f"the scorer of {task} cannot read the answer ({type(error).__name__})")
    return Score(reward, {"accuracy": float(reward == 1.0)})


@lru_cache(maxsize=64)
def _load_scorer(task: str, level: int | None, settings: str) -> Any:
    """Return a data set that scores all puzzles of a task. Cached because some data sets take long to create."""
    return make_dataset(task, level, json.loads(settings), seed=0)


def is_plain_arithmetic(expression: str) -> bool:
    """Return whether a text has only numbers, one-letter variables and common functions, and no other names."""
    return (
        len(expression) <= MAX_EXPRESSION
        and PLAIN.fullmatch(expression) is not None
        and not re.search(r"\.\s*[A-Za-z_]", expression)
        and all(FUNCTIONS.fullmatch(name) for name in NAME.findall(expression))
    )
