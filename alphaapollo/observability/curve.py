"""Plot metrics of a run (metrics.jsonl) in the terminal and as figures, e.g. of notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from alphaapollo.runs.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (step, value), sorted by step
Band = Sequence[tuple[float, float, float]]  # (step, low, high), sorted by step

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
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


def plot_run(path: Path, names: Sequence[str], title: str = "", x_label: str = "step") -> Figure:
    """Plot metrics of a metrics.jsonl as a matplotlib figure, with the confidence intervals that the run has logged:
    the metrics `NAME/low` and `NAME/high`. Raises ValueError for a metric without values."""
    curves, rows, bands = read_curves(path, names), read_metrics(path), dict[str, Band]()
    for name in names:
        bounds = [(row["step"], row.get(f"{name}/low"), row.get(f"{name}/high")) for row in rows]
        bands[name] = [(step, low, high) for step, low, high in bounds if low is not None and high is not None]
    return plot_curves_as_figure(curves, title, x_label, {name: band for name, band in bands.items() if band})


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure as PNG, SVG or PDF, by the ending of the path. Raises ValueError for another ending."""
    if path.suffix not in FIGURE_SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(FIGURE_SUFFIXES[:-1])} or {FIGURE_SUFFIXES[-1]}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
