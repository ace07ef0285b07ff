r"""Grader of multiple-choice questions: the answer is one letter from A to Z."""

from __future__ import annotations

import re

from alphaapollo.rewards.answer_extraction import find_marked_answer
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.types import Prompt, Score

# `B`, `(b)`, `B. Paris`, `Option B: Paris`, `B is correct`; a lower-case letter in brackets or alone ("a" is a word)
LETTER = re.compile(
    r"\s*(?:[Oo]ption\s+|[Cc]hoice\s+)?(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])(?=\s*(?:[.):,]|$|\n))"
    r"|([A-Za-z])(?=\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b|\)|\.?\s*$))",
    re.ASCII,
)
LATEX = re.compile(r"\\(?:text(?:bf|rm)?|math(?:bf|rm)|boxed)\s*|[{}$*]")
STATED = re.compile(
    r"(?i:answer|choice|option)(?:\s++(?i:is|should be|would be))?(?:\s*+:\s++|\s++)(?=(?:[(\[]\s*+)?[A-Za-z]\b)"
)
MAX_CHOICE = 100  # characters after "the answer is" that are read


def grade(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the completion chooses the letter of the ground truth, else 0. A completion that chooses
    no letter has the wrong format. Raises ValueError if the ground truth is not a letter."""
    if (truth := read_first_letter(prompt.ground_truth or "")) is None:
        raise ValueError(f"the ground truth {prompt.ground_truth!r} is not a letter from A to Z.")
    chosen = find_chosen_letter(completion)
    return make_wrong_format_score("no letter is chosen") if chosen is None else make_accuracy_score(chosen == truth)


def find_chosen_letter(text: str) -> str | None:
    """Return the letter marked by <answer>, box or ####, else after "answer is", else at the start of the last line."""
    marked = find_marked_answer(text)
    if marked is not None:
        return read_first_letter(marked) or _find_stated_letter(marked)
    lines = text.strip().splitlines()
    return _find_stated_letter(text) or (read_first_letter(lines[-1]) if lines else None)


def read_first_letter(text: str) -> str | None:
    """Return the choice letter at the start of a text; None if the text starts with anything else."""
    found = LETTER.match(LATEX.sub("", text).strip())
    return (found[1] or found[2] or found[3]).upper() if found else None


def _find_stated_letter(text: str) -> str | None:
    """Return the letter after the last "answer", "choice" or "option" that a letter follows, e.g. "the answer is B"."""
    bare = LATEX.sub("", text)
    ends = [stated.end() for stated in STATED.finditer(bare)]
    letters = (read_first_letter(bare[end : end + MAX_CHOICE].split("\n")[0]) for end in reversed(ends))
    return next(filter(None, letters), None)
