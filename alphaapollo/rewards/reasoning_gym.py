"""Tasks of the package reasoning-gym: made by it and scored by it, without running what a model wrote.

Some of its scorers call `eval` on the answer; here they get `ast.literal_eval`, which reads the lists that they look
for and nothing else. Others give the answer to sympy's parser, which is `eval` too: only plain arithmetic reaches it.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym

from alphaapollo.types import Outcome, Prompt, Score

EXTRA = "reasoning_gym"
"""The entry of `Prompt.extra_info` that holds the puzzle: {task, level, settings, entry}."""

EVALUATING = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
PARSED_BY_SYMPY = frozenset(
    {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
)
FUNCTIONS = re.compile(r"a?(sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|pi|Abs|[A-Za-z]")
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
PLAIN = re.compile(r"[\w\s+\-*/^().,]*", re.ASCII)
MAX_EXPRESSION = 500  # characters

for name in EVALUATING:
    vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval


def grade(prompt: Prompt, completion: str) -> Score:
    """What the package's own scorer says of the last <answer>...</answer>, from 0 to 1; accuracy is 1 only at 1. Wrong
    format where there is none, or the scorer raises for it and not for the right one.

    Raises:
        ValueError: the prompt holds no puzzle of this package.
    """
    puzzle = prompt.extra_info.get(EXTRA)
    if puzzle is None:
        raise ValueError(f"row {prompt.id} holds no puzzle; play it with env.env_name=reasoning_gym")
    answer = reasoning_gym.utils.extract_answer(completion)
    if answer is None:
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no <answer>...</answer>")
    task = puzzle["task"]
    dataset = _scorer(task, puzzle["level"], json.dumps(puzzle["settings"]))
    if task in PARSED_BY_SYMPY and not is_plain(answer):
        answer = ""
    try:
        reward = float(dataset.score_answer(answer, puzzle["entry"]))
    except Exception as error:  # noqa: BLE001  many scorers raise for an answer that they cannot read
        dataset.score_answer(puzzle["entry"]["answer"], puzzle["entry"])  # unless it is their own failure
        reason = f"the scorer of {task} cannot read it ({type(error).__name__})"
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, reason)
    return Score(reward, {"accuracy": float(reward == 1.0)})


@lru_cache(maxsize=64)
def _scorer(task: str, level: int | None, settings: str) -> Any:
    """Any data set of the task scores all its puzzles; some take long to make."""
    return make_dataset(task, level, json.loads(settings), seed=0)


def is_plain(expression: str) -> bool:
    """Arithmetic in numbers, one-letter variables and common functions; nothing that could name a Python object."""
    return (
        len(expression) <= MAX_EXPRESSION
        and PLAIN.fullmatch(expression) is not None
        and not re.search(r"\.\s*[A-Za-z_]", expression)
        and all(FUNCTIONS.fullmatch(name) for name in NAME.findall(expression))
    )


def make_dataset(task: str, level: int | None, settings: Mapping[str, Any], seed: int) -> Any:
    """A data set of one puzzle; `level` is one of the package's curriculum for the task, None its defaults.

    Raises:
        ValueError: the task or the level is not there, or does not go with the settings.
    """
    factory = reasoning_gym.factory
    kind, config_class = factory.DATASETS[task]
    own = {"seed": seed, "size": 1}
    try:
        if level is None:
            return kind(config_class(**settings, **own))
        curriculum = factory.create_curriculum(task)
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration({**settings, **own})
        for name, value in settings.items():
            setattr(config, name, value)  # what is set by name wins over the level
        return kind(config)
    except (AssertionError, TypeError, ValueError) as error:
        at = "" if level is None else f" at level {level}"
        raise ValueError(f"reasoning_gym's task {task!r} cannot be made{at} with {dict(settings)}: {error}") from error
