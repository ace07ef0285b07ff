"""Templates of prompts with fields in braces, and texts that end a completion (rollout.stop)."""

from __future__ import annotations

import re
from collections.abc import Sequence


def fill_template(template: str, **values: object) -> str:
    """Replace each `{name}` in a template by its value. Other braces are not changed, also inside of values."""
    return re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: str(values[match[1]]), template)


def cut_at_stop(text: str, stop: Sequence[str], includes_stop: bool = False) -> str:
    """Cut a text before the stop string that ends first or, if `includes_stop`, after it. A text without stop strings
    is unchanged."""
    spans = [(text.index(string) + len(string), text.index(string)) for string in stop if string in text]
    end, start = min(spans, default=(len(text), len(text)))
    return text[: end if includes_stop else start]


def show_first(lines: Sequence[str], count: int = 5) -> str:
    """Return the first lines, each in a line of its own, and how many more there are."""
    more = [f"and {len(lines) - count} more"] if len(lines) > count else []
    return "\n  ".join([*lines[:count], *more])
