"""Formats of values in pages."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from urllib.parse import urlencode

from markupsafe import Markup

from alphaapollo.evaluation.metrics import Estimate
from alphaapollo.observability.run_view import format_duration
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer.curves import PALETTE
from alphaapollo.viewer.samples import split_into_parts

BARS, CROSS = "▁▂▃▄▅▆▇█", "\N{MULTIPLICATION SIGN}"
MAX_BARS = 32


def format_number(value: float | None) -> str:
    """Format a number with about four digits; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1e6 else f"{value:.2e}"


def format_estimate(estimate: JsonObject | Estimate | None) -> str:
    """Format a mean with its interval, e.g. `0.812 (0.750 to 0.868)`; a dash for None."""
    estimate = vars(estimate) if isinstance(estimate, Estimate) else estimate
    if estimate is None or estimate.get("value") is None:
        return "-"
    value, low, high = (estimate.get(name) for name in ("value", "low", "high"))
    interval = "" if low is None or high is None else f" ({format_number(low)} to {format_number(high)})"
    return f"{format_number(value)}{interval}"


def format_counts(joined: str | None) -> str:
    """Count the values of a comma-separated list, most frequent first: `a,b,a` -> `2 x a, 1 x b`."""
    counts = Counter((joined or "").split(","))
    if len(counts) == 1 and not (joined or "none").startswith(tuple("-0123456789")):
        return next(iter(counts))
    shown = [f"{count} x {text.removesuffix('.0')}" for text, count in counts.most_common(8)]
    return ", ".join([*shown, "..."] if len(counts) > len(shown) else shown)


def format_time(seconds: float) -> str:
    """Format a time since 1970, e.g. `2026-11-24 15:20`; empty for 0."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if seconds else ""


def draw_bars(listed: str, low: float, high: float) -> Markup:
    """Draw a bar for each value of a JSON list, or a cross for null. low, high: values of an empty and a full bar."""
    values: list[float | None] = json.loads(listed)
    marks = ""
    for value in values[:MAX_BARS]:
        share = 0.0 if value is None else (value - low) / ((high - low) or 1)
        marks += CROSS if value is None else BARS[round(min(max(share, 0), 1) * (len(BARS) - 1))]
    label = format_counts(",".join("none" if value is None else format_number(value) for value in values))
    return Markup('<span class="bars" role="img" title="{0}" aria-label="rewards: {0}">{1}</span>').format(label, marks)


def format_line(text: object, most: int = 100) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(str("" if text is None else text)[: 4 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


FILTERS: dict[str, Callable[..., object]] = {
    "number": format_number,
    "estimate": format_estimate,
    "counts": format_counts,
    "time": format_time,
    "duration": format_duration,
    "bars": draw_bars,
    "line": format_line,
    "color": lambda number: PALETTE[number % len(PALETTE)],
    "query_with": lambda options, **changes: urlencode(
        [(name, value) for name, value in options.multi_items() if name not in changes and value]
        + [(name, value) for name, value in changes.items() if value not in ("", None)]
    ),  # of a link
    "parts": lambda text: list(split_into_parts(text)),
}
