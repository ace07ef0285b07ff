"""Read the accepted answers of a ground truth, which is a value of a data file: text, a number, a list or a dict."""

from __future__ import annotations

import math
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from alphaapollo.utils.literals import drop_none, read_literal

ANSWER_KEYS = ("target", "answer", "answers", "ground_truth", "golden_answers", "value", "aliases", "text", "spans")


def read_accepted_answers(truth: object, reads_numbers: bool = False) -> list[str]:
    """Return the accepted answers of a ground truth (see `list_answers`) as texts, without None and blank texts: 12 for
    12.0, and `True`, `true`, `Yes` and `yes` for True. With `reads_numbers`, the text `[1, 2]` is two answers. Raises
    ValueError for NaN, bytes and other types."""
    if reads_numbers and isinstance(truth, str) and (value := read_literal(truth, has_answers=True)) is not None:
        truth = value
    return [text for value in list_answers(truth) for text in _list_texts(value)]


def list_answers(truth: object) -> list[object]:
    """Return the answers that a ground truth lists, as values.

    A list has alternatives. A dict has one or several under ANSWER_KEYS: {"target": [...]} of Search-R1, {"text":
    [...]} of SQuAD. The text of a list of texts, or of such a dict, is read as JSON or Python. The text `[1, 2]` is
    one answer. Raises ValueError for a dict without these keys, and for a list of lists, which has no agreed meaning.
    """
    truth = _parse_text(truth) if isinstance(truth, str) else drop_none(truth)
    if isinstance(truth, dict):
        found = [truth[key] for key in ANSWER_KEYS if key in truth]
        if not found:
            raise ValueError(
                f"the ground truth {truth!r:.200} has no accepted answer. Use a key of {', '.join(ANSWER_KEYS)}."
            )
        return [answer for value in found for answer in list_answers(value)]
    if not isinstance(truth, list):
        return [truth]
    if any(isinstance(one, list | dict) for one in truth):
        raise ValueError(
            f"the ground truth {truth!r:.200} is a list of lists or dicts. Use a list of texts or numbers."
        )
    return truth


def _parse_text(text: str) -> object:
    """Return the list of texts or the dict of answers that a text shows, else the text."""
    value = read_literal(text, has_answers=True)
    if isinstance(value, dict):
        return value if any(key in value for key in ANSWER_KEYS) else text
    return value if value and all(one is None or isinstance(one, str) for one in value) else text


def _list_texts(value: object) -> list[str]:
    if isinstance(value, bool):
        return ["True", "true", "Yes", "yes"] if value else ["False", "false", "No", "no"]
    if value is None or isinstance(value, str):
        return [value] if value and value.strip() else []
    if isinstance(value, date):
        return [str(value)]
    if isinstance(value, int | float | np.floating | Fraction | Decimal) and math.isfinite(value):
        return [_format_number(value)]
    raise ValueError(f"the ground truth has {value!r:.200} ({type(value).__name__}). Use text or a finite number.")


def _format_number(value: float | np.floating[Any] | Fraction | Decimal) -> str:
    """Return a number as a model would write it: 12 for 12.0, and 0.1 for the float64 of a float32 column."""
    if value == int(value):
        return str(int(value))
    rounded = f"{value:.7g}" if isinstance(value, float) else ""
    return rounded if rounded and float(np.float32(rounded)) == value else str(value)
