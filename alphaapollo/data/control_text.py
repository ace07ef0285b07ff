"""Text that people, data, tools and environments write never becomes control tokens of a chat.

Control strings in it, e.g. `<|im_end|>`, are split in two by SPLIT before the chat template runs. Renderer.encode
tokenizes the two parts separately, so that the same text has ordinary tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

SPLIT = "\ufdd0"  # not a character of any script


def make_control_pattern(tokens: Iterable[str], has_tags: bool) -> re.Pattern[str]:
    """Return a pattern of control strings: `tokens`, without `has_tags` except pairs of tags, e.g. <think> and
    </think>, which people write on purpose. <s> and </s> are no tags."""
    names = {*tokens} - {"<s>"} if not has_tags else set()
    tags = {tag for name in names if (end := f"</{name[1:]}") in names for tag in (name, end)}
    controls = sorted({*tokens} - tags, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, controls)) or "(?!)")


def split_control_text(value: object, pattern: re.Pattern[str], found: Counter[str]) -> Any:
    """Split the control strings in all texts of a JSON value, and count them in `found`."""
    if isinstance(value, str):
        strings = pattern.findall(value)
        found.update(strings)
        return pattern.sub(lambda match: match[0][0] + SPLIT + match[0][1:], value) if strings else value
    if isinstance(value, Mapping):
        return {key: split_control_text(item, pattern, found) for key, item in value.items()}
    return [split_control_text(item, pattern, found) for item in value] if isinstance(value, list | tuple) else value
