r"""Read answers: the answers that a ground truth accepts, and the final answer that a text marks.

Models write the texts, so every search takes time linear in the length of the text."""

from __future__ import annotations

import math
import re
from datetime import date
from decimal import Decimal
from fractions import Fraction

import numpy as np

from alphaapollo.utils.literals import drop_none, read_literal

BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")  # the start of a box, or another brace
MAX_SEPARATOR = 120  # characters between two boxes that are one answer
LIST_MARK = re.compile(r"\n\s*(?:[-+*•]|\w{1,3}[.)])\s|\(\w{1,3}\)")  # `- `, `2. `, `(b)`
MARKUP = re.compile(r"\\(?:hspace\{[^}]*|[a-zA-Z]+|.)|[^\w\s,;/.:=()]|\s", re.S)  # counts as a space
BRACES = str.maketrans("", "", "{}")
SEPARATOR = re.compile(
    r"[\s,;/.:=()]*(?:(?:(?:[\w()]+,? ){0,3}(?:and(?: also|/or)?|or(?:,? [\w()]+){0,3})|[yeo]|und|oder|et|ou|或者?"
    r"|和|及|vs|also|else|otherwise|alternatively|maybe|perhaps|possibly|as well as|br)\b)?"
    r"(?:[\s,;/.:=()]|\b[a-zA-Z]\w{0,9} ?=)*"
)
BARE_BOX = re.compile(r"\\boxed\s+([^{$\n][^$\n]*)")


def find_marked_answer(text: str) -> str | None:
    r"""Return the answer marked with `<answer>` (or a `\boxed` inside this tag), else with `\boxed`, else with `####`.
    Several tags or boxes with nothing but a separator between them are one answer: `2, 3` for `\boxed{2} and
    \boxed{3}`. Returns None for a text without these marks."""
    answers = find_marked_answers(text)
    return ", ".join(dict.fromkeys(answers)) if answers else None


def find_marked_answers(text: str) -> list[str]:
    """Return the parts that `find_marked_answer` joins, e.g. alternatives; empty for a text without marks."""
    tag = find_answer_tag(text)
    searched = text if tag is None else tag
    without_box = find_text_after_hash_marks(text) if tag is None else tag
    candidates = [answer for answer in (find_boxed(searched), without_box) if answer is not None]
    return _list_adjacent(_list_boxes(searched)) or candidates[:1]


def find_answer_tag(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, or None without this tag. Tags with a separator between
    them are one answer: `5, 6` for `<answer>5</answer> or <answer>6</answer>`."""
    parts = [part.partition("<answer>") for part in text.split("</answer>")[:-1]]
    tags = [(gap if gap.strip(" ") else None, content) for gap, opened, content in parts if opened]
    return ", ".join(_list_adjacent(tags)) if tags else None


def _list_adjacent(marked: list[tuple[str | None, str]]) -> list[str]:
    """Return the contents of the last pairs (text before, content) that have only separators between them."""
    contents: list[str] = []
    for gap, content in reversed(marked):
        contents.append(content.strip())
        if gap is None or len(gap) > MAX_SEPARATOR:
            break
        words = MARKUP.sub(" ", LIST_MARK.sub(" ", gap)).translate(BRACES).split()
        if not SEPARATOR.fullmatch(" ".join(words)):
            break
    return contents[::-1]


def _list_boxes(text: str) -> list[tuple[str | None, str]]:
    """Return (text before, content) of each complete box. Of nested boxes, only the innermost counts."""
    opened: list[re.Match[str] | None] = []  # per open brace: the match of BRACE, if the brace opens a box
    boxes: list[tuple[str | None, str]] = []
    last_end = last_content = 0  # end of the last box, and start of its content
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(None if brace[0] == "{" else brace)
        elif opened and (box := opened.pop()) and box.end() > last_content:
            boxes.append((text[last_end : box.start()], text[box.end() : brace.start()]))
            last_content, last_end = box.end(), brace.end()
    return boxes


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` (or `\fbox`), the innermost of nested boxes. Without such
    a box, return what follows the last `\boxed` without braces, up to a dollar sign (`$\boxed 7$`)."""
    found = [content for _, content in _list_boxes(text)] or BARE_BOX.findall(text)
    return found[-1].strip() if found else None


def find_text_after_hash_marks(text: str) -> str | None:
    """Return the rest of the line after the last `####`; None for a text without this mark."""
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

    A list has alternatives. A dict has answers under ANSWER_KEYS, e.g. {"target": [...]} in Search-R1, {"text": [...]}
    in SQuAD. A text that shows a list of texts or such a dict is read as JSON or Python. The text `[1, 2]` is one
    answer. Raises ValueError for a dict without these keys, and for a list of lists, which has no agreed meaning.
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
    if any(isinstance(answer, list | dict) for answer in truth):
        raise ValueError(
            f"the ground truth {truth!r:.200} is a list of lists or dicts. Use a list of texts or numbers."
        )
    return truth


def _parse_text(text: str) -> object:
    """Return the list of texts or the dict of answers that a text shows, else the text."""
    value = read_literal(text, has_answers=True)
    if isinstance(value, dict):
        return value if any(key in value for key in ANSWER_KEYS) else text
    return value if value and all(answer is None or isinstance(answer, str) for answer in value) else text


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
