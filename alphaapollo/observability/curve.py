"""Plot metrics of a run (metrics.jsonl) in the terminal, as PNG and in notebooks.

python -m alphaapollo.observability.curve outputs/quickstart/grpo val/accuracy val/accuracy_greedy --png curve.png
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from alphaapollo.observability.terminal import Terminal
from alphaapollo.runs.metrics_file import read_metrics
from alphaapollo.utils.hub import expand_home

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (step, value), sorted by step
Band = Sequence[tuple[float, float, float]]  # (step, low, high), sorted by step

STYLES = [("cyan", "braille"), ("magenta", "•"), ("green", "x"), ("yellow", "+")]  # markers are distinct without colors


def read_curves(path: Path, names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Read the points (step, value) of each metric in a metrics.jsonl. Missing and null values are skipped.

    Raises ValueError for a metric without values.
    """
    records = read_metrics(path)
    curves = {name: [(r["step"], r[name]) for r in records if r.get(name) is not None] for name in names}
    for name, points in curves.items():
        if not points:
            names_with_values = sorted({key for record in records for key in record} - {"step"})
            raise ValueError(f"{path} has no values of {name!r}. It has: {', '.join(names_with_values) or 'nothing'}.")
    return curves


def plot_curves(curves: Mapping[str, Points], width: int = 72, height: int = 10) -> Text:
    """Plot curves as text for the terminal. If there are several curves, a legend shows their markers and last values.

    width: maximum number of characters. height: lines, without the step labels and the legend.

    Raises ValueError if there are more curves than markers.
    """
    import plotext

    if len(curves) > len(STYLES):
        raise ValueError(
            f"{len(curves)} metrics are given, but there are only {len(STYLES)} markers. Plot fewer metrics at once."
        )
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height + 1)
    plotext.limitsize(False, False)
    plotext.xaxes(False, False)
    plotext.yaxes(True, False)
    plotext.xfrequency(2)  # labels of the first and the last step
    plotext.yfrequency(3)
    plotext.ylim(*compute_value_range([value for points in curves.values() for _, value in points]))
    for points, (color, marker) in zip(curves.values(), STYLES, strict=False):
        steps, values = [step for step, _ in points], [value for _, value in points]
        plotext.plot(steps, values, marker=marker, color=color)
    text = Text.from_ansi(plotext.build().rstrip())
    if len(curves) > 1:
        for (name, points), (color, marker) in zip(curves.items(), STYLES, strict=False):
            sign = "━" if marker == "braille" else marker
            text.append(f"\n   {sign * 3} ", color).append(f"{name} {points[-1][1]:.3f}")
    return text


def compute_value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the y axis, which is never empty: (min, max) of the values, or (0, 1) if they look like rates
    (no value is negative, and the largest is in [0.3, 1])."""
    low, high = min(values), max(values)
    if low >= 0 and 0.3 <= high <= 1:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def plot_curves_as_figure(
    curves: Mapping[str, Points], title: str = "", x_label: str = "step", bands: Mapping[str, Band] | None = None
) -> Figure:
    """Plot curves as a matplotlib figure, which notebooks display directly. bands: confidence intervals by curve,
    which the value axis may cut off."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, dpi=100)
            return png.getvalue()

    figure, bands = NotebookFigure(figsize=(7, 4), layout="constrained"), bands or {}
    axes = figure.add_subplot()
    for name, points in curves.items():
        steps, values = [step for step, _ in points], [value for _, value in points]
        (line,) = axes.plot(steps, values, marker="o" if len(steps) <= 50 else "", markersize=3, label=name)
        if band := bands.get(name):
            steps, lows, highs = ([row[column] for row in band] for column in range(3))
            axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15)
    low, high = compute_value_range([value for points in curves.values() for _, value in points])
    margin = (high - low) / 30
    axes.set(xlabel=x_label, title=title, ylim=(low - margin, high + margin))
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def save_curves_as_png(curves: Mapping[str, Points], path: Path, title: str = "") -> None:
    """Save the curves as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plot_curves_as_figure(curves, title).savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Plot metrics of a run. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m alphaapollo.observability.curve", description="Plot metrics.")
    parser.add_argument("run", metavar="RUN", type=expand_home, help="the run's folder, or its metrics.jsonl")
    parser.add_argument("metrics", metavar="METRIC", nargs="+", help="e.g. critic/score/mean val/accuracy")
    parser.add_argument("--png", type=expand_home, help="also save the plot to this file")
    options = parser.parse_args(argv)
    try:
        path = options.run / "metrics.jsonl" if options.run.is_dir() else options.run
        curves = read_curves(path, options.metrics)
        Terminal(highlight=False).print(plot_curves(curves), soft_wrap=True)
        if options.png:
            save_curves_as_png(curves, options.png)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
