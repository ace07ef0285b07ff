"""Read lists and dicts that were written as text, e.g. by the export of a table to CSV; drop keys without a value."""

from __future__ import annotations

import ast
import json
import re

import numpy as np

from alphaapollo.utils.json_types import Json

BETWEEN_DICTS = re.compile(r"(?<=\})\s*\n\s*(?=\{)")  # the text of a NumPy array has no commas: {...}\n {...}
BETWEEN_TEXTS = re.compile(r"(?<=[^\s\[,]['\"])\s+(?=['\"])")  # 'a' 'b'


def read_literal(text: str, has_answers: bool = False) -> list[Json] | dict[Json, Json] | None:
    """Return the list or dict that a text shows as JSON, in Python's or in NumPy's notation; None for another text.

    has_answers: also read NumPy arrays of texts. Not for messages, in which 'a' 'b' may be part of a content.
    """
    text = text.strip()
    if not text.startswith(("[", "{")):
        return None
    python = BETWEEN_TEXTS.sub(", ", text) if has_answers else text
    attempts = ((json.loads, text), (ast.literal_eval, python), (ast.literal_eval, BETWEEN_DICTS.sub(", ", python)))
    for parse, source in attempts:
        try:
            value: object = parse(source)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, list | dict) else None
    return None


def drop_none(value: Json) -> Json:
    """Return a value without the keys whose value is None, which parquet adds, at every level. NumPy values and tuples
    become Python values and lists."""
    if isinstance(value, np.ndarray | np.bool_ | np.integer):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: drop_none(part) for name, part in value.items() if part is not None}
    return [*map(drop_none, value)] if isinstance(value, list | tuple) else value
