"""Formats of values in pages."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from urllib.parse import urlencode

from markupsafe import Markup

from alphaapollo.config.metrics import describe_axis, explain_metric
from alphaapollo.observability.curve import PALETTE
from alphaapollo.observability.metric_texts import format_duration
from alphaapollo.observability.sample_metrics import Estimate
from alphaapollo.plugins.viewer.samples import split_into_parts
from alphaapollo.utils.json_types import JsonObject

BAR_WIDTH, BAR_HEIGHT = 5, 16  # pixels of a bar
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


def draw_bars(listed: str, scale: float) -> Markup:
    """Draw a small bar for each value of a JSON list, or a cross for null. scale: value of a full bar."""
    values: list[float | None] = json.loads(listed)
    shapes, middle = list[str](), BAR_HEIGHT / 2 if any((value or 0) < 0 for value in values) else BAR_HEIGHT - 1
    for number, value in enumerate(values[:MAX_BARS]):
        x, height = number * BAR_WIDTH, middle * min(abs(value or 0) / (scale or 1), 1)
        y, kind = (middle - height, "") if (value or 0) >= 0 else (middle, ' class="below"')
        if value is None:
            shapes.append(f'<path class="none" d="M{x} {middle - 4}l4 4m-4 0l4 -4"/>')
        elif height:
            shapes.append(f'<rect{kind} x="{x}" y="{y:.1f}" width="{BAR_WIDTH - 1}" height="{max(height, 1):.1f}"/>')
    width = BAR_WIDTH * min(len(values), MAX_BARS)
    label = format_counts(",".join("none" if value is None else format_number(value) for value in values))
    line = f'<path class="line" d="M0 {middle + 0.5:g}H{width - 1}"/>'
    head = f'<svg class="bars" role="img" width="{width}" height="{BAR_HEIGHT}" aria-label="rewards: {label}">'
    return Markup(f"{head}<title>{label}</title>{line}{''.join(shapes)}</svg>")


def format_size(parameters: float | None) -> str:
    """Format a number of parameters, e.g. `135M`; empty for None."""
    units = [(size, name) for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")) if (parameters or 0) >= size]
    return f"{(parameters or 0) / units[0][0]:.3g}{units[0][1]}" if units else ""


def format_line(text: object, most: int = 100) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(str("" if text is None else text)[: 4 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


FILTERS: dict[str, Callable[..., object]] = {
    "axis": lambda metric: describe_axis([metric]),
    "explain": explain_metric,
    "number": format_number,
    "estimate": format_estimate,
    "counts": format_counts,
    "time": format_time,
    "duration": format_duration,
    "bars": draw_bars,
    "size": format_size,
    "line": format_line,
    "color": lambda number: PALETTE[number % len(PALETTE)],
    "query_with": lambda options, **changes: urlencode(
        [(name, value) for name, value in options.multi_items() if name not in changes and value]
        + [(name, value) for name, value in changes.items() if value not in ("", None)]
    ),  # of a link
    "parts": lambda text: list(split_into_parts(text)),
}
