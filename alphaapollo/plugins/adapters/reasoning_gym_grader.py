"""Grader of reasoning-gym tasks. The package reasoning-gym scores the answer, and no code in the answer is executed.

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

import reasoning_gym  # noqa: F401 its import takes long, so it is not part of the time of the first answer

from alphaapollo.plugins.adapters.reasoning_gym_puzzles import PUZZLE_KEY, make_puzzle_dataset
from alphaapollo.rewards.answers import find_answer_tag
from alphaapollo.rewards.base import get_question, make_wrong_format_score
from alphaapollo.types import Episode, Prompt, Score
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.thoughts import remove_thoughts

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
MAX_EXPRESSION = 500  # characters, or twice those of the stored answer
MAX_ANSWER = 20_000  # characters; the largest grids have a few thousand

for name in EVAL_MODULES:
    vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval


def grade_reasoning_gym(prompt: Prompt, completion: str) -> Score:
    """Return reasoning-gym's score of the last <answer>...</answer>, from 0 to 1. `accuracy` is 1 for a score of 1. A
    completion has the wrong format if reasoning-gym raises an error for its answer but not for the correct one."""
    puzzle = _get_puzzle(prompt)
    answer = find_answer_tag(completion)
    if answer is None or len(answer) > MAX_ANSWER:
        return make_wrong_format_score("no <answer>...</answer>" if answer is None else "the answer is too long")
    task = puzzle["task"]
    dataset = _load_scorer(task, puzzle["level"], json.dumps(puzzle["settings"]))
    stored = str(puzzle["entry"]["answer"])  # may contain a function such as Integral, which an answer can only repeat
    is_safe = answer.split() == stored.split() or is_plain_arithmetic(answer, 2 * len(stored))
    if task in SYMPY_TASKS and not is_safe:
        answer = ""
    try:
        reward = float(dataset.score_answer(answer, puzzle["entry"]))
    except Exception as error:  # noqa: BLE001  many scorers raise for an answer that they cannot read
        dataset.score_answer(puzzle["entry"]["answer"], puzzle["entry"])  # raises if the scorer itself is broken
        return make_wrong_format_score(f"the scorer of {task} cannot read the answer ({type(error).__name__})")
    return Score(reward, {"accuracy": float(reward == 1.0)})


def answer_reasoning_gym(prompt: Prompt) -> str | None:
    """Return an answer that the grader must score 1; None if the puzzle has no stored answer."""
    answer = _get_puzzle(prompt)["entry"]["answer"]
    return None if answer is None else f"<answer>{answer}</answer>"


def grade(prompt: Prompt, trajectory: Episode) -> Score:
    """Grade the answer of an episode, without thoughts."""
    return grade_reasoning_gym(prompt, remove_thoughts(trajectory.marked_text or trajectory.text))


grade.make_answer = answer_reasoning_gym  # type: ignore[attr-defined]  # docs/plugins.md
grade.needs_ground_truth = True  # type: ignore[attr-defined]


def _get_puzzle(prompt: Prompt) -> JsonObject:
    """Return the puzzle of the environment, or of a row that reasoning-gym wrote (metadata.source_dataset)."""
    puzzle: JsonObject | None = prompt.extra_info.get(PUZZLE_KEY)
    metadata = prompt.extra_info.get("metadata") or {}
    if puzzle is None and "source_dataset" in metadata:
        entry = {"question": get_question(prompt), "answer": prompt.ground_truth, "metadata": metadata}
        return {"task": metadata["source_dataset"], "level": None, "settings": {}, "entry": entry}
    if puzzle is None:
        raise ValueError(
            f"row {prompt.id} has no puzzle. Set env.env_name=reasoning_gym, which creates puzzles, or keep the column "
            "metadata of the package."
        )
    return puzzle


@lru_cache(maxsize=64)
def _load_scorer(task: str, level: int | None, settings: str) -> Any:
    """Return a reasoning-gym data set, which can score any puzzle of the task. `settings`: JSON."""
    return make_puzzle_dataset(task, level, json.loads(settings), seed=0)


def is_plain_arithmetic(expression: str, max_length: int = 0) -> bool:
    """Return whether an expression has only numbers, operators, one-letter variables and common functions."""
    return (
        len(expression) <= max(MAX_EXPRESSION, max_length)
        and PLAIN.fullmatch(expression) is not None
        and not re.search(r"\.\s*[A-Za-z_]", expression)
        and all(FUNCTIONS.fullmatch(name) for name in NAME.findall(expression))
    )
