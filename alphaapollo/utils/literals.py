"""Read lists and dicts that were written as text, e.g. by the export of a table to CSV."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

NO_COMMA = re.compile(r"(?<=\})\s*\n\s*(?=\{)")  # between the dicts of a NumPy array


def read_literal(text: str) -> list[Any] | dict[Any, Any] | None:
    """Return the list or dict that a text shows as JSON, in Python's or in NumPy's notation; None for another text."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        return None
    for read, written in ((json.loads, text), (ast.literal_eval, text), (ast.literal_eval, NO_COMMA.sub(", ", text))):
        try:
            value: object = read(written)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, list | dict) else None
    return None
