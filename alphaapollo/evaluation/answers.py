"""The answer of a sample, in a form in which equal answers are equal texts: what a majority vote counts."""

from __future__ import annotations

import re
from fractions import Fraction

from alphaapollo.rewards.answer_extraction import find_marked_answer

TAIL = 10_000  # characters of a text in which its answer is looked for
NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
WHOLE_NUMBER = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d{1,200})?(\.\d{1,200})?(?:/(\d{1,200}))?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
NOISE = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\s|\.$")


def answer_of(text: str) -> str | None:
    r"""The final answer of a sample's last turn, e.g. `\boxed{1{,}200.0}` and `#### $1200` are both "1200".

    What the text marks as final (`<answer>`, `\boxed`, `####`: rewards.answer_extraction), else its last
    number, else all of it;
    None for an empty one. Answers are compared as they are written, white space, LaTeX spacing and capitals aside,
    and numbers by their value: `\frac12` and `(1/2)` stay two answers, for the graders alone know more.
    """
    text = text[-TAIL:]
    marked = find_marked_answer(text)
    if marked is None:
        numbers = NUMBER.findall(text)
        marked = numbers[-1] if numbers else text
    bare = NOISE.sub("", marked.replace("{,}", ","))
    return _number(LATEX_FRACTION.sub(r"\1/\2", bare)) or bare.casefold() or None


def _number(text: str) -> str | None:
    """Its value as text, where the whole text is a number."""
    found = WHOLE_NUMBER.fullmatch(text)
    if found is None:
        return None
    sign, whole, decimals, divisor = found.groups()
    if not (whole or decimals) or (divisor and int(divisor) == 0):
        return None
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(divisor or 1)
    return str(-value if sign else value)
