r"""Multiple choice: one letter from A to Z."""

from __future__ import annotations

import re

from alphaapollo.rewards.answer_extraction import marked_answer
from alphaapollo.types import Outcome, Prompt, Score

# `B`, `(b)`, `B. Paris`, `Option B: Paris`, `B is correct`; a small letter in brackets, or alone, for "a" is a word
LETTER = re.compile(
    r"\s*(?:[Oo]ption\s+|[Cc]hoice\s+)?(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])(?=\s*(?:[.):,]|$|\n))"
    r"|([A-Za-z])(?=\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b|\)|\.?\s*$))",
    re.ASCII,
)
LATEX = re.compile(r"\\(?:text(?:bf|rm)?|math(?:bf|rm)|boxed)\s*|[{}$*]")
STATED = re.compile(r"(?i:answer|choice|option)(?:\s+(?i:is|should be|would be))?\s*:?\s+(?=[(\[]?\s*[A-Za-z]\b)")


def grade(prompt: Prompt, completion: str) -> Score:
    """1 if the letter is the ground truth's, else 0; wrong format where no letter is chosen.

    Raises:
        ValueError: the ground truth is no letter.
    """
    if (truth := letter(prompt.ground_truth or "")) is None:
        raise ValueError(f"the ground truth {prompt.ground_truth!r} is not a letter of multiple choice")
    chosen = find_letter(completion)
    if chosen is None:
        return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, "no letter is chosen")
    accuracy = float(chosen == truth)
    return Score(accuracy, {"accuracy": accuracy})


def find_letter(text: str) -> str | None:
    """The letter of the marked answer; without one, that after the last "answer is", else the last line's, if it
    begins with one."""
    marked = marked_answer(text)
    if marked is not None:
        return letter(marked) or _stated(marked)
    lines = text.strip().splitlines()
    return _stated(text) or (letter(lines[-1]) if lines else None)


def letter(text: str) -> str | None:
    """The letter that a text begins with."""
    found = LETTER.match(LATEX.sub("", text).strip())
    return (found[1] or found[2] or found[3]).upper() if found else None


def _stated(text: str) -> str | None:
    bare = LATEX.sub("", text)
    letters = [letter(bare[stated.end() :].split("\n")[0]) for stated in STATED.finditer(bare)]
    return next((found for found in reversed(letters) if found), None)
