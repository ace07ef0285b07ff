"""Majority vote over the samples of a problem. Answers are normalized, so that equal answers are equal strings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from alphaapollo.rewards.answers import find_marked_answer
from alphaapollo.utils.thoughts import remove_thoughts


def majority_accuracy(answers: Sequence[str | None], accuracies: Sequence[float]) -> float:
    """Compute the accuracy of the most frequent answer of one problem (majority vote), in [0, 1].

    A tie gives the mean over the tied answers, which is the expected accuracy of a random choice. A sample without an
    answer (None) does not vote; without votes the result is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = {answer for answer, count in votes.items() if count == most}
    counted = [value for answer, value in zip(answers, accuracies, strict=True) if answer in leaders]
    return math.fsum(counted) / len(counted)  # leaders have equally many samples, so this is the mean of their means


TAIL = 10_000  # number of characters at the end of a text that are searched


NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


NUMBER_PARTS = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d{1,200})?(\.\d{1,200})?(?:/(\d{1,200}))?")


LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")


IGNORED_LATEX = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\s|\.$")


def extract_answer(text: str) -> str | None:
    r"""Extract the normalized final answer of a response: `\boxed{1{,}200.0}` and `#### $1200` both give "1200".

    Returns the answer marked with `<answer>`, `\boxed` or `####`, else the last number, else the whole text; None for
    an empty text. White space, LaTeX spacing and case are removed, and numbers are written in one form. Other
    equivalent expressions, e.g. `\frac12` and `(1/2)`, remain different.
    """
    text = remove_thoughts(text)[-TAIL:]
    marked = find_marked_answer(text)
    if marked is None:
        numbers = NUMBER.findall(text)
        marked = numbers[-1] if numbers else text
    bare = IGNORED_LATEX.sub("", marked.replace("{,}", ","))
    return _normalize_number(LATEX_FRACTION.sub(r"\1/\2", bare)) or bare.casefold() or None


def _normalize_number(text: str) -> str | None:
    """Return a number as a reduced fraction, e.g. "1,200.50" as "2401/2"; None if the text is not a number."""
    match = NUMBER_PARTS.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals, divisor = match.groups()
    if not (whole or decimals) or (divisor and int(divisor) == 0):
        return None
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(divisor or 1)
    return str(-value if sign else value)
