r"""Read answers: those that a ground truth accepts, and the final answer that a text marks.

Models write the texts, so every search takes time linear in the length of the text.
"""

from __future__ import annotations

import math
import re
from datetime import date
from decimal import Decimal
from fractions import Fraction

import numpy as np

from alphaapollo.utils.literals import drop_none, read_literal

BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
BETWEEN_BOXES = r"(?:[\s,$}]|\\text\{|\band\b|\bor\b|\b[a-z]\s*=)*"
SEVERAL_BOXES = re.compile(rf"\\boxed\{{[^{{}}]*\}}(?:{BETWEEN_BOXES}\\boxed\{{[^{{}}]*\}})+")
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
BARE_BOX = re.compile(r"\\boxed\s+([^{$\n][^$\n]*)")


def find_marked_answer(text: str) -> str | None:
    r"""Return the answer marked with `<answer>` (or a `\boxed` inside this tag), else with `\boxed`, else with `####`.
    Returns None for a text without these marks."""
    tag = find_answer_tag(text)
    boxed = find_boxed(text if tag is None else tag)
    if boxed is not None:
        return boxed
    return find_text_after_hash_marks(text) if tag is None else tag


def find_answer_tag(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`; None if there is none."""
    for part in reversed(text.split("</answer>")[:-1]):
        if "<answer>" in part:
            return part.partition("<answer>")[2].strip()
    return None


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` (or `\fbox`), the innermost of nested boxes. Without such
    a box, return what follows the last `\boxed` without braces, up to a dollar sign (`$\boxed 7$`)."""
    opened: list[int | None] = []  # per open brace: start of the content if the brace opens a box
    last: tuple[int, int] | None = None
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(None if brace[0] == "{" else brace.end())
        elif opened and (start := opened.pop()) is not None:
            last = max(last or (0, 0), (start, brace.start()))
    if last:
        return text[last[0] : last[1]].strip()
    bare = BARE_BOX.findall(text)
    return bare[-1].strip() if bare else None


def find_adjacent_boxes(text: str) -> str | None:
    r"""Return the contents of the last boxes if they are adjacent: `2, 3` for `\boxed{2} and \boxed{3}`; else None."""
    boxed_part = find_answer_tag(text) or text
    rows = list(SEVERAL_BOXES.finditer(boxed_part))
    if rows and find_boxed(boxed_part) == (boxes := BOX.findall(rows[-1][0]))[-1].strip():
        return ", ".join(dict.fromkeys(box.strip() for box in boxes))
    return None


def find_text_after_hash_marks(text: str) -> str | None:
    """Return the rest of the line after the last `####`; None if there is none."""
    if "####" not in text:
        return None
    return text.rpartition("####")[2].strip().partition("\n")[0].strip()


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
    if not isinstance(value, int | float | np.floating | Fraction | Decimal) or not math.isfinite(value):
        raise ValueError(f"the ground truth has {value!r:.200} ({type(value).__name__}). Use text or a finite number.")
    if value == int(value):
        return [str(int(value))]  # 12 for 12.0
    rounded = f"{value:.7g}" if isinstance(value, float) else ""
    return [rounded if rounded and float(np.float32(rounded)) == value else str(value)]  # 0.1 of a float32 column
