"""Plot metrics of a run (metrics.jsonl) in the terminal and as figures, e.g. of notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from alphaapollo.config.metrics import describe_axis
from alphaapollo.runs.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")  # Okabe and Ito
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # names of plotly: those of matplotlib
STYLES = [("cyan", "braille"), ("magenta", "•"), ("green", "x"), ("yellow", "+")]  # markers are distinct without colors


@dataclass(frozen=True)
class Curve:
    """Values of a metric in the order of the steps, [N] each, and its 95 % intervals."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    band: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))  # [M, 3]: step, low, high
    runs: Sequence[Curve] = ()  # if this is a mean of few runs: their curves, drawn instead of the intervals


def read_curves(path: Path, names: Sequence[str]) -> dict[str, Curve]:
    """Read metrics of a metrics.jsonl, with the intervals that the run has logged as `NAME/low` and `NAME/high`.
    Missing and null values are skipped.

    Raises ValueError for a metric without values.
    """
    records, curves = read_metrics(path), dict[str, Curve]()
    for name in names:
        points, band = (
            np.array([row for record in records if None not in (row := [record.get(key) for key in keys])], dtype=float)
            for keys in (("step", name), ("step", f"{name}/low", f"{name}/high"))
        )
        if not len(points):
            names_with_values = sorted({key for record in records for key in record} - {"step"})
            raise ValueError(f"{path} has no values of {name!r}. It has: {', '.join(names_with_values) or 'nothing'}.")
        curves[name] = Curve(name, points[:, 0], points[:, 1], band.reshape(-1, 3))
    return curves


def plot_curves(curves: Mapping[str, Curve], width: int = 72, height: int = 10) -> Text:
    """Plot metrics as text for the terminal, below their unit and direction. If there are several, a legend shows their
    markers and last values.

    width: maximum number of characters. height: lines of the plot, without the step labels.

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
    plotext.ylim(*compute_value_range([curve.values for curve in curves.values()]))
    for curve, (color, marker) in zip(curves.values(), STYLES, strict=False):
        plotext.plot(curve.steps.tolist(), curve.values.tolist(), marker=marker, color=color)
    axis = describe_axis(curves)
    text = Text(f"{axis}\n" * bool(axis), "dim") + Text.from_ansi(plotext.build().rstrip())
    if len(curves) > 1:
        for (name, curve), (color, marker) in zip(curves.items(), STYLES, strict=False):
            sign = "━" if marker == "braille" else marker
            text.append(f"\n   {sign * 3} ", color).append(f"{name} {curve.values[-1]:.3f}")
    return text


def compute_value_range(values: Sequence[np.ndarray | float]) -> tuple[float, float]:
    """Return the range of the y axis, which is wider than rounding: (min, max) of the values, or (0, 1) if they look
    like rates (no value is negative, and the largest is in [0.3, 1])."""
    joined = np.hstack(values)
    low, high = float(joined.min()), float(joined.max())
    if low >= 0 and 0.3 <= high <= 1:
        return 0.0, 1.0
    return (low, high) if high - low > 1e-5 * abs(high) else (low - 0.5, high + 0.5)


def plot_curves_as_figure(
    curves: Mapping[str, Curve], title: str = "", x_label: str = "step", y_label: str = "", numbers: Sequence[int] = ()
) -> Figure:
    """Plot curves, by their labels, as a matplotlib figure, which notebooks display directly. The value axis may cut
    off their intervals. numbers: of the curves' colors (PALETTE, then with other DASHES), unless 0, 1, ..."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, dpi=100)
            return png.getvalue()

    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in zip(numbers or range(len(curves)), curves.items(), strict=True):
        color, dash = PALETTE[number % len(PALETTE)], [*DASHES.values()][number // len(PALETTE) % len(DASHES)]
        marker = "o" if len(curve.steps) <= 50 else ""
        axes.plot(curve.steps, curve.values, dash, color=color, marker=marker, markersize=3, label=name)
        for run in curve.runs:
            axes.plot(run.steps, run.values, dash, color=color, linewidth=0.7, alpha=0.45)
        if len(curve.band) and not curve.runs:
            axes.fill_between(*curve.band.T, color=color, alpha=0.12, linewidth=0)
    low, high = compute_value_range([line.values for curve in curves.values() for line in (curve, *curve.runs)])
    margin = (high - low) / 30
    axes.set(xlabel=x_label, ylabel=y_label, title=title, ylim=(low - margin, high + margin))
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def plot_run(path: Path, names: Sequence[str], title: str = "", x_label: str = "step") -> Figure:
    """Plot metrics of a metrics.jsonl as a matplotlib figure. Raises ValueError for a metric without values."""
    return plot_curves_as_figure(read_curves(path, names), title, x_label, describe_axis(names))


def check_figure_path(path: Path) -> None:
    """Raise ValueError unless the ending is one of FIGURE_SUFFIXES."""
    if path.suffix not in FIGURE_SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(FIGURE_SUFFIXES[:-1])} or {FIGURE_SUFFIXES[-1]}.")


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure as PNG, SVG or PDF, by the ending of the path. Raises ValueError for another ending."""
    check_figure_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
