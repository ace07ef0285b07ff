r"""Mathematical answers, compared by math-verify (symbolic equality of LaTeX and plain expressions).

math-verify's own time-outs are signal alarms, which fail outside a main thread and miss C code: they are off here, and
the process is killed instead (rewards.isolation). Imported only in that process: it brings sympy along.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from alphaapollo.rewards.extract import marked_answer
from alphaapollo.types import Outcome, Prompt, Score

TAIL = 2000  # characters of a text that marks no answer in which one is looked for
DELIMITER = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]")  # also the currency sign
PREAMBLE = re.compile(r"^.*\b(?:is|are|equals)\b:?", re.DOTALL | re.IGNORECASE)
NUMBER_WITH_UNIT = re.compile(r"(-?[\d.,/]*\d)\s+[a-zA-Z ]+\.?")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the answers are mathematically equal, else 0; wrong format where no expression can be read."""
    truth = prompt.ground_truth
    if truth is None or not (gold := read_marked(marked_answer(truth) or truth)):
        raise ValueError(f"the ground truth {truth!r} is not a mathematical expression")
    marked = marked_answer(completion)
    answer = read(completion[-TAIL:]) if marked is None else read_marked(marked)
    if not answer:
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no mathematical expression in the answer")
    accuracy = float(equal(gold, answer))
    return Score(accuracy, {"accuracy": accuracy})


def read(text: str) -> list[Any]:
    """The final expression in a text: sympy objects and, as a fallback, its string. Empty: none."""
    return list(
        parse(text, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()], parsing_timeout=None)
    )


def read_marked(answer: str) -> list[Any]:
    """The expression of an answer that stands alone, in LaTeX or plain: without delimiters, "the answer is", units."""
    bare = PREAMBLE.sub("", DELIMITER.sub("", answer)).strip().rstrip(".")
    number = NUMBER_WITH_UNIT.fullmatch(bare)
    return read(f"\\boxed{{{number[1] if number else bare}}}") or read(answer)


def equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether any reading of the answer equals any of the ground truth; raises what sympy raises, if none does."""
    try:
        return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    except Exception:
        if verify(gold, answer, timeout_seconds=None):
            return True
        raise
