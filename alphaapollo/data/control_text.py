"""Text that people, data, tools and environments write never becomes control tokens of a chat.

Control strings in it, e.g. `<|im_end|>`, are split in two by SPLIT before the chat template runs. Renderer.encode
tokenizes the two parts separately, so that the same text has ordinary tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

SPLIT = "\ufdd0"  # not a character of any script


def make_control_pattern(tokens: Iterable[str], known: Collection[str] = ()) -> re.Pattern[str]:
    """Return a pattern of control strings: `tokens` except tags, e.g. <think>, which people write on purpose. A tag and
    its end, e.g. </think>, are both in `known`. <s> and </s> are no tags."""
    tags = {tag for one in known if one != "<s>" and (end := f"</{one[1:]}") in known for tag in (one, end)}
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
