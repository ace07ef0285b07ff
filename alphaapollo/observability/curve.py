"""Curves of metrics.jsonl, drawn in the terminal and as PNG.

python -m alphaapollo.observability.curve outputs/quickstart/grpo/metrics.jsonl val/accuracy val/accuracy_greedy \\
    --png curve.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from alphaapollo.observability.terminal import Terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (step, value), by rising step
Band = Sequence[tuple[float, float, float]]  # (step, low, high), by rising step

STYLES = ("cyan", "magenta", "green", "yellow")
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille character: [column][row]


def read_curves(path: Path, names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """The points of each metric in a metrics.jsonl; iterations without it, or with null, are left out.

    Raises ValueError for a metric that no line has.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    curves = {name: [(r["step"], r[name]) for r in records if r.get(name) is not None] for name in names}
    for name, points in curves.items():
        if not points:
            known = sorted({key for record in records for key in record} - {"step"})
            raise ValueError(f"{path} has no values of {name!r}. It has: {', '.join(known) or 'nothing'}.")
    return curves


def draw(curves: Mapping[str, Points], width: int = 72, height: int = 10) -> Text:
    """The curves as text of at most `width` columns: `height` rows, the steps, and a legend if there are several.

    Every second dot of the second curve is left out, so that it can be told apart without colours.
    """
    every = [point for points in curves.values() for point in points]
    low, high = value_range([value for _, value in every])
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    labels = [tick(high), tick((low + high) / 2), tick(low)]
    margin = max(map(len, labels))
    columns = max(width - margin - 2, 2)
    cells = [[0] * columns for _ in range(height)]
    styles = [[""] * columns for _ in range(height)]
    for index, points in enumerate(curves.values()):
        previous = None
        for x, value in enumerate(_resample(points, first, last, 2 * columns)):
            if value is None or (index and x % 2):
                continue
            dot = round((high - value) / (high - low) * (4 * height - 1))
            for y in range(dot, dot + 1) if previous is None or index else _span(previous, dot):
                cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
                styles[y // 4][x // 2] = STYLES[index % len(STYLES)]
            previous = dot
    beside = {0: labels[0], height // 2: labels[1], height - 1: labels[2]}
    text = Text()
    for row in range(height):
        text.append(f"{beside.get(row, ''):>{margin}} ", "dim").append("┤" if row in beside else "│", "dim")
        for bits, style in zip(cells[row], styles[row], strict=True):
            text.append(chr(0x2800 + bits) if bits else " ", style)
        text.append("\n")
    steps = f"{tick(first)}{tick(last):>{columns - len(tick(first))}}"
    text.append(" " * (margin + 2) + steps, "dim")
    return text.append("\n").append(_legend(curves, margin + 2)) if len(curves) > 1 else text


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The axis: 0 to 1 for shares that use a good part of it, else as far as the values go; never empty."""
    low, high = min(values), max(values)
    if low >= 0 and 0.3 <= high <= 1:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def tick(value: float) -> str:
    """A number as a label: three significant digits, large and whole numbers without decimals."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def _span(previous: int, dot: int) -> range:
    """The dots of a column that join it to the column before."""
    if abs(dot - previous) <= 1:
        return range(dot, dot + 1)
    return range(previous + 1, dot + 1) if dot > previous else range(dot, previous)


def _resample(points: Points, first: float, last: float, count: int) -> list[float | None]:
    """Values at `count` even steps, on straight lines between the points; None outside them."""
    values: list[float | None] = [None] * count
    scale = (last - first) / (count - 1) or 1.0
    right = 0
    for x in range(count):
        step = first + x * scale
        while right < len(points) - 1 and points[right][0] < step:
            right += 1
        (x0, y0), (x1, y1) = points[max(right - 1, 0)], points[right]
        if x0 - scale / 2 <= step <= x1 + scale / 2:
            share = min(max((step - x0) / (x1 - x0), 0.0), 1.0) if x1 > x0 else 1.0
            values[x] = y0 + share * (y1 - y0)
    return values


def _legend(curves: Mapping[str, Points], indent: int) -> Text:
    text = Text(" " * indent)
    for index, (name, points) in enumerate(curves.items()):
        line = "⠉⠉⠉" if index == 0 else "⠁⠁⠁"
        text.append(line, STYLES[index % len(STYLES)]).append(f" {name} {points[-1][1]:.3f}   ")
    return text


def empty_figure() -> Figure:
    """Notebooks show it without %matplotlib, too. Raises ValueError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing a picture needs matplotlib. pip install -e '.[plots]' in the clone.") from None

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, dpi=100)
            return png.getvalue()

    return Picture(figsize=(7, 4), layout="constrained")


def figure(
    curves: Mapping[str, Points], title: str = "", over: str = "step", bands: Mapping[str, Band] | None = None
) -> Figure:
    """The curves over the steps, those of `bands` with their intervals. Raises ValueError where matplotlib is not
    installed."""
    drawn, bands = empty_figure(), bands or {}
    axes = drawn.add_subplot()
    for name, points in curves.items():
        steps, values = [step for step, _ in points], [value for _, value in points]
        (line,) = axes.plot(steps, values, marker="o", markersize=3, label=name)
        if band := bands.get(name):
            steps, lows, highs = ([row[column] for row in band] for column in range(3))
            axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15)
    every = [*curves.values(), *bands.values()]
    low, high = value_range([value for points in every for _, *values in points for value in values])
    margin = (high - low) / 30
    axes.set(xlabel=over, title=title, ylim=(low - margin, high + margin))
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def intervals(rows: Sequence[tuple[str, str, float, float, float]], title: str = "") -> Figure:
    """(source, figure, value, low, high) of shares: a point with its interval each, a colour a source. Raises
    ValueError where matplotlib is not installed."""
    drawn = empty_figure()
    axes = drawn.add_subplot()
    names = list(dict.fromkeys(name for _, name, *_ in rows))
    for source in dict.fromkeys(source for source, *_ in rows):
        own = [row for row in rows if row[0] == source]
        places, values = [names.index(row[1]) for row in own], [row[2] for row in own]
        reach = [[row[2] - row[3] for row in own], [row[4] - row[2] for row in own]]
        axes.errorbar(places, values, yerr=reach, fmt="o", capsize=4, label=source or "(no data source)")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(title=title, ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def save_png(curves: Mapping[str, Points], path: Path, title: str = "") -> None:
    """The curves as a PNG. Raises ValueError where matplotlib is not installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(curves, title).savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the named metrics of a metrics.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m alphaapollo.observability.curve", description="Draw metrics.")
    parser.add_argument("file", type=Path, help="a run's metrics.jsonl")
    parser.add_argument("metrics", nargs="+", help="e.g. reward/mean val/accuracy")
    parser.add_argument("--png", type=Path, help="also write a picture here")
    options = parser.parse_args(argv)
    try:
        curves = read_curves(options.file, options.metrics)
        Terminal(highlight=False).print(draw(curves))
        if options.png:
            save_png(curves, options.png)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
