r"""Grader of word problems with one number as the answer.

The grader reads the last number of the marked answer (`<answer>`, `\boxed`, `####`), or of a text without a marked
answer. It compares numbers as exact fractions: `1,200`, `$1200.00`, `1.2e3` and `2400/2` are equal.
"""

from __future__ import annotations

import re
from fractions import Fraction

from alphaapollo.rewards.accepted_answers import read_accepted_answers
from alphaapollo.rewards.answer_extraction import find_marked_answer
from alphaapollo.rewards.base import make_accuracy_score, make_wrong_format_score
from alphaapollo.types import Prompt, Score

LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
MAX_DIGITS = 200  # bounds degenerate repetition; Python refuses to parse numbers of thousands of digits
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;!]|\{,\}|,\\!|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")  # 1{,}000
SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")  # 1 000; outside a marked answer, 5 100 may be two numbers
POWER_OF_TEN = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*(?:\^|\*\*)\s*+\{?\s*+([-+]?\d+)\s*\}?")
DATE = re.compile(r"\b\d{4}-(?:0[1-9]|1[0-2])(?:-\d{2})?\b(?!\s*=)")  # neither a number nor a subtraction
UNSIGNED = r"(?:(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"
# A minus sign belongs to the number unless it subtracts (5-3, x-3); a currency sign may follow it.
NUMBER = re.compile(rf"((?<![\w.)\]])-)?\s?\\?[$€£]?\s?({UNSIGNED})(?:/({UNSIGNED}))?")


def grade(prompt: Prompt, completion: str) -> Score:
    """Return a score of 1 if the final numbers of completion and an accepted answer are equal, else 0. A completion
    without a number has the wrong format. Raises ValueError for a ground truth without a number."""
    accepted = _read_accepted_numbers(prompt.ground_truth)
    answer = read_final_number(completion)
    if answer is None:
        return make_wrong_format_score("no number in the answer")
    return make_accuracy_score(answer in accepted)


def answer_from_truth(prompt: Prompt) -> str:
    """Return an answer that `grade` must score 1. Raises ValueError for an unreadable ground truth."""
    return f"#### {_read_accepted_numbers(prompt.ground_truth)[0]}"


def _read_accepted_numbers(truth: object) -> list[Fraction]:
    texts = read_accepted_answers(truth, reads_numbers=True)
    if not (numbers := [number for text in texts if (number := read_final_number(text)) is not None]):
        raise ValueError(f"the ground truth {truth!r:.200} has no number")
    return numbers


def read_final_number(text: str) -> Fraction | None:
    """Return the last number of the marked answer, or of a text without a marked answer; None without a number."""
    marked = find_marked_answer(text)
    if marked is not None:
        marked = SPACED.sub(lambda number: number[0].replace(" ", ""), marked)
    answer = LATEX_FRACTION.sub(r"\1/\2", text if marked is None else marked)
    answer = POWER_OF_TEN.sub(r"e\1", THOUSANDS.sub("", answer))
    numbers = NUMBER.findall(DATE.sub("", answer))
    return _parse_fraction(*numbers[-1]) if numbers else None


def _parse_fraction(sign: str, numerator: str, denominator: str) -> Fraction | None:
    """Return the value of a number in three parts, e.g. ("-", "1,000", "3"); None if it is too long or divides by 0."""
    if _count_digits(numerator) + _count_digits(denominator) > MAX_DIGITS:
        return None
    value = Fraction(numerator.replace(",", ""))
    divisor = Fraction(denominator.replace(",", "") or 1)
    if divisor == 0:
        return None
    return -value / divisor if sign else value / divisor


def _count_digits(number: str) -> int:
    """Return an upper bound of the number of digits when `number` is written without exponent, e.g. 4 for `1e3`."""
    mantissa, _, exponent = number.lower().partition("e")
    if len(exponent) > len(str(MAX_DIGITS)) + 1:
        return MAX_DIGITS + 1
    return len(mantissa) + abs(int(exponent or 0))
