"""Extract the final answer of a sample in a normalized form, for majority votes."""

from __future__ import annotations

import re
from fractions import Fraction

from alphaapollo.rewards.answer_extraction import find_marked_answer

TAIL = 10_000  # number of characters at the end of a text that are searched
NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
WHOLE_NUMBER = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d{1,200})?(\.\d{1,200})?(?:/(\d{1,200}))?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
NOISE = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\s|\.$")


def extract_answer(text: str) -> str | None:
    r"""Extract the answer of a sample's last turn: `\boxed{1{,}200.0}` and `#### $1200` are both "1200".

    Returns the marked answer (`<answer>`, `\boxed`, `####`: rewards/answer_extraction.py), else the last number, else
    the text; None for an empty text. Ignores white space, LaTeX spacing and case, and compares numbers by value. Other
    equivalent forms, e.g. `\frac12` and `(1/2)`, remain different answers.
    """
    text = text[-TAIL:]
    marked = find_marked_answer(text)
    if marked is None:
        numbers = NUMBER.findall(text)
        marked = numbers[-1] if numbers else text
    bare = NOISE.sub("", marked.replace("{,}", ","))
    return _parse_number(LATEX_FRACTION.sub(r"\1/\2", bare)) or bare.casefold() or None


def _parse_number(text: str) -> str | None:
    """Return the exact value of a number as text; None if the text is not a number."""
    found = WHOLE_NUMBER.fullmatch(text)
    if found is None:
        return None
    sign, whole, decimals, divisor = found.groups()
    if not (whole or decimals) or (divisor and int(divisor) == 0):
        return None
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(divisor or 1)
    return str(-value if sign else value)
