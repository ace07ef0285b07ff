"""Find questions, answers, final answers and labelled solutions in the rows of any dataset."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from alphaapollo.data.files import BadRow, DataRow
from alphaapollo.rewards.answers import find_boxed, find_text_after_hash_marks

QUESTION_KEYS = ("question", "problem", "prompt", "Problem", "instruction", "Question")
ANSWER_KEYS = ("answer", "solution", "ground_truth", "final_answer", "target", "boxed_answer", "Answer")
BODY_KEY = "Body"  # SVAMP's text that precedes its "Question"
LAST_LINE = re.compile(r"(?:\A|\n)\s*(?:final answer|answer|a)\s*[:=]\s*(\S[^\n]*?)\s*\Z", re.IGNORECASE)
WORDS_OF_A_LINE, WORDS_OF_AN_ANSWER = 8, 40  # longer text is not a final answer


class Dropped(Exception):
    """Raised for a row that cannot be used. The message is the same for all rows with the same reason."""


@dataclass(frozen=True)
class Problem:
    """A question and its answer, found in a row of any dataset."""

    question: str
    ground_truth: str
    solution: str  # the answer column, often with a derivation
    metadata: dict[str, Any]  # the other columns


@dataclass(frozen=True)
class Columns:
    """Columns selected by the user; `a.b` is entry b of column a."""

    question: str = ""  # empty: the first of QUESTION_KEYS that contains text
    answer: str = ""  # empty: the first of ANSWER_KEYS
    where: tuple[str, ...] = ()  # keep rows that meet all conditions: COLUMN (is true or 1) or COLUMN=VALUE

    def check(self, rows: Iterable[DataRow | BadRow], source: str) -> None:
        """Raise ValueError if no row has a selected column."""
        known: dict[str, None] = {}
        for row in rows:
            if not isinstance(row, BadRow):
                known |= dict.fromkeys(_names(row))
        named = {"--question_key": [self.question], "--answer_key": [self.answer]}
        named["--where"] = [condition.partition("=")[0] for condition in self.where]
        for option, names in named.items():
            for name in names:
                if name and name not in known:
                    raise ValueError(f"{option} {name}: no row of {source} has it. Use one of {', '.join(known)}.")

    def keep(self, row: DataRow) -> None:
        """Raise Dropped if the row does not meet a condition."""
        for condition in self.where:
            name, equals, wanted = condition.partition("=")
            value = value_at(row, name)
            shown = str(value).lower() if isinstance(value, bool) else as_text(value)
            if (shown or "").lower() != wanted.lower() if equals else shown not in ("true", "True", "1"):
                raise Dropped(f"not --where {condition}")


def column_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --question_key, --answer_key and --where."""
    named = "column of the %s, a.b for the entry b of the column a (default: the first of %s)"
    parser.add_argument("--question_key", default="", help=named % ("question", ", ".join(QUESTION_KEYS)))
    parser.add_argument("--answer_key", default="", help=named % ("answer", ", ".join(ANSWER_KEYS)))
    parser.add_argument(
        "--where", nargs="+", default=[], help="take rows where COLUMN is true or 1, or where COLUMN=VALUE"
    )


def chosen_columns(args: argparse.Namespace) -> Columns:
    """Columns from the arguments of `column_arguments`."""
    return Columns(args.question_key, args.answer_key, tuple(args.where))


def find_problem(row: DataRow, columns: Columns | None = None) -> Problem:
    """Question and answer of a row. Raises Dropped if one is missing."""
    columns = columns or Columns()
    question_key, question = find_question(row, columns)
    answer_key, answer = find_text(row, [columns.answer] if columns.answer else ANSWER_KEYS, "answer")
    truth = ground_truth_of(answer)
    if not truth:
        raise Dropped("the ground truth is empty")
    if is_prose(truth):
        raise Dropped(
            rf"the answer is a text without \boxed{{}}, #### or a last line 'A: ...' (column {answer_key}): name the "
            "column of the final answer with --answer_key"
        )
    solution = None if columns.answer else as_text(row.get("solution"))
    return Problem(
        question=question,
        ground_truth=truth,
        solution=solution if solution and is_unicode(solution) else answer,
        metadata={key: value for key, value in row.items() if key not in (question_key, answer_key, "solution")},
    )


def find_question(row: DataRow, columns: Columns) -> tuple[str, str]:
    """(column, question), with SVAMP's text before its question. Raises Dropped if there is none."""
    key, question = find_text(row, [columns.question] if columns.question else QUESTION_KEYS, "question")
    body = as_text(row.get(BODY_KEY)) if key == "Question" else None
    if not body:
        return key, question
    if not is_unicode(body):
        raise Dropped(f"the question is not valid Unicode (column {BODY_KEY})")
    return key, f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {question}"


def ground_truth_of(answer: str) -> str:
    r"""The last `\boxed{}`, else the text after `####`, else a last line `A: ...`, else the complete answer."""
    for found in (find_boxed(answer), find_text_after_hash_marks(answer)):
        if found is not None:
            return found
    line = LAST_LINE.search(answer)
    return line[1] if line else answer.strip()


def without_final_answer(text: str) -> str:
    """A solution without the line that starts with `####` or `A:`."""
    if "####" in text:
        return text.rpartition("####")[0].rstrip()
    return LAST_LINE.sub("", text).rstrip() if "\n" in text.strip() else text


def is_prose(text: str) -> bool:
    """Whether the text is too long to be a final answer."""
    words = len(text.split())
    lines = "\n" in text and r"\begin" not in text
    return words > (WORDS_OF_A_LINE if lines else WORDS_OF_AN_ANSWER)


def labelled_solutions(row: DataRow) -> list[tuple[str, bool]]:
    """Distinct `{solution, is_correct}` entries in any column, or in a list `solutions`."""
    listed = row.get("solutions")
    values = listed if isinstance(listed, list) else list(row.values())
    found: dict[str, bool] = {}
    for value in values:
        if isinstance(value, dict) and {"solution", "is_correct"} <= value.keys():
            text = as_text(value["solution"])
            if text and is_unicode(text) and value["is_correct"] in (0, 1):
                found.setdefault(text, bool(value["is_correct"]))
    return list(found.items())


def find_text(row: DataRow, keys: Sequence[str], what: str) -> tuple[str, str]:
    """The first of the columns that contains text, and its text."""
    present = [key for key in keys if value_at(row, key) is not None]
    if not present:
        raise Dropped(f"no {what} (looked for {', '.join(keys)})")
    problems = []
    for key in present:
        text = as_text(value_at(row, key))
        if text and is_unicode(text):
            return key, text
        problems.append("is not text" if text is None else "is not valid Unicode" if text else "is empty")
    raise Dropped(f"the {what} {problems[0]} (column {present[0]})")


def value_at(row: DataRow, key: str) -> Any:
    """Column `key`, or entry b of column a for `a.b`; None if missing."""
    if key in row or "." not in key:
        return row.get(key)
    column, _, rest = key.partition(".")
    inner = row.get(column)
    return value_at(inner, rest) if isinstance(inner, dict) else None


def as_text(value: Any) -> str | None:
    """Text or a number as text; the last user message of a chat; None for anything else (also NaN)."""
    if isinstance(value, list):
        said = [part.get("content") for part in value if isinstance(part, dict) and part.get("role") == "user"]
        value = said[-1] if said else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):  # an empty cell of pandas
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded. JSON may contain half a surrogate pair, which cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _names(row: DataRow) -> list[str]:
    """Names of the columns, and of the entries of nested columns."""
    return [
        name
        for key, value in row.items()
        for name in (key, *(f"{key}.{inner}" for inner in (_names(value) if isinstance(value, dict) else ())))
    ]
