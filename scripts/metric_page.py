"""Print the page "All metrics": the catalogue of metrics (alphaapollo/config/metrics.yaml) as tables.

Part of `make docs-site`. On the terminal, `alphaapollo explain METRIC` prints an entry.
"""

from __future__ import annotations

import re

from alphaapollo.config.metrics import DIRECTIONS, MetricText, load_catalogue

INTRO = """# All metrics

[metrics.md](metrics.md) explains how to read them. `<...>` stands for any text, and `<pass>` for nothing or `_greedy`.
An arrow shows whether higher (↑) or lower (↓) values are better. `alphaapollo explain METRIC` prints a row in the
terminal.
"""
ARROWS = dict(zip(DIRECTIONS, "↑↓", strict=True))
HEAD = "\n## {}\n\n| name | unit | meaning | healthy | otherwise |\n|---|---|---|---|---|\n"


def render_page() -> str:
    parts = [INTRO]
    for heading, entries in load_catalogue().metrics.items():
        parts += [HEAD.format(heading), *(render_row(names, text) for names, text in entries.items())]
    return "".join(parts)


def render_row(names: str, text: MetricText) -> str:
    cell = ", ".join(re.sub(r"^(.+?)(?: (up|down))?$", format_name, name) for name in names.split(", "))
    return " | ".join(["", cell, text.unit, text.meaning, text.healthy, text.otherwise, ""]).strip() + "\n"


def format_name(match: re.Match[str]) -> str:
    return f"`{match[1]}`" + (f" {ARROWS[match[2]]}" if match[2] else "")


if __name__ == "__main__":
    print(render_page())
