"""Templates of prompts with fields in braces."""

from __future__ import annotations

import re


def fill_template(template: str, **values: object) -> str:
    """Replace each `{name}` in a template by its value. Other braces are not changed, also inside of values."""
    return re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: str(values[match[1]]), template)
