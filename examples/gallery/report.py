"""Make the table and the curves from the runs.

Results are also saved to figures.json beside the curves, so running one recipe again changes only its row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from examples.curves import save_svg
from examples.gallery.runs import num_iterations, read_metrics

STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t by number of seeds."""
QUESTIONS = 256  # held out
BESIDE = "grpo"  # drawn in every plot


@dataclass(frozen=True)
class Curves:
    """Validation accuracy of one recipe, of S seeds at V iterations."""

    recipe: str
    steps: np.ndarray  # [V]
    accuracy: np.ndarray  # [S, V], of the S finished seeds
    seconds: float  # of training without validation; mean over seeds
    trajectories: float  # generated
    made: str  # date of the last run, YYYY-MM-DD


def read_curves(out: Path, recipe: str, seeds: Sequence[int], iterations: int) -> Curves | None:
    """Curves of the finished seeds; None for fewer than two."""
    last = num_iterations(recipe, iterations)
    folders = [out / f"seed_{seed}" / recipe for seed in seeds]
    runs = [lines for lines in map(read_metrics, folders) if lines and lines[-1]["step"] == last]
    if len(runs) < 2:
        return None
    validated = [[line for line in lines if "val/accuracy" in line] for lines in runs]
    trained = [[line for line in lines if line["step"] > 0] for lines in runs]
    return Curves(
        recipe,
        np.array([line["step"] for line in validated[0]]),
        np.array([[line["val/accuracy"] for line in lines] for lines in validated]),
        sum(one["timing/step"] - one.get("timing/validate", 0.0) for lines in trained for one in lines) / len(runs),
        sum(one["rollout/trajectories"] for lines in trained for one in lines) / len(runs),
        date.fromtimestamp(max(folder.stat().st_mtime for folder in folders if folder.exists())).isoformat(),
    )


def load_figures(path: Path) -> dict[str, Curves]:
    """Results by recipe, written by save_figures; empty if the file is missing."""
    if not path.exists():
        return {}
    return {
        recipe: Curves(recipe, np.array(one.pop("steps")), np.array(one.pop("accuracy")), **one)
        for recipe, one in json.loads(path.read_text()).items()
    }


def save_figures(path: Path, all_curves: Iterable[Curves]) -> None:
    """Write one line per recipe, sorted by name."""
    lines = [
        f"{json.dumps(one.recipe)}: "
        + json.dumps(
            {
                "steps": one.steps.tolist(),
                "accuracy": one.accuracy.tolist(),
                "seconds": one.seconds,
                "trajectories": one.trajectories,
                "made": one.made,
            }
        )
        for one in sorted(all_curves, key=lambda one: one.recipe)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def interval(values: np.ndarray) -> str:
    """Mean and half-width of the 95 % interval over seeds (Student's t), e.g. `.912 ± .031`."""
    half = STUDENT[len(values)] * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{values.mean():.3f} ± {half:.3f}"


def seeds_above_start(curves: Curves) -> int:
    """Number of seeds with a gain above the 95 % interval of the difference of two proportions."""
    start, end = curves.accuracy[:, 0], curves.accuracy[:, -1]
    error = np.sqrt((start * (1 - start) + end * (1 - end)) / QUESTIONS)
    return int((end - start > 1.96 * error).sum())


def table(all_curves: Sequence[Curves]) -> str:
    """Markdown table, sorted by final accuracy."""
    lines = [
        "| recipe | start | end | seeds above their start | trajectories | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for curves in sorted(all_curves, key=lambda one: -one.accuracy[:, -1].mean()):
        accuracy = curves.accuracy
        cells = [
            curves.recipe,
            interval(accuracy[:, 0]),
            interval(accuracy[:, -1]),
            f"{seeds_above_start(curves)} of {len(accuracy)}",
            f"{curves.trajectories:.0f}",
            f"{curves.seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curves: Curves, beside: Curves | None, path: Path) -> None:
    """Plot each seed thin, their mean thick, and the mean of the recipe `beside` dashed."""
    figure = Figure(figsize=(5.0, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for seed in curves.accuracy:
        axes.plot(curves.steps, seed, color="C0", alpha=0.35, linewidth=1)
    axes.plot(curves.steps, curves.accuracy.mean(axis=0), color="C0", marker="o", markersize=3, label=curves.recipe)
    if beside is not None and beside.recipe != curves.recipe:
        axes.plot(beside.steps, beside.accuracy.mean(axis=0), "--", color="grey", label=beside.recipe)
    _finish(figure, axes, path)


def draw_all(all_curves: Sequence[Curves], path: Path) -> None:
    """Plot the means of all recipes."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    colours = mpl.colormaps["turbo"](np.linspace(0.02, 0.98, len(all_curves)))
    for curves, colour in zip(sorted(all_curves, key=lambda one: -one.accuracy[:, -1].mean()), colours, strict=True):
        axes.plot(curves.steps, curves.accuracy.mean(axis=0), color=colour, linewidth=1.2, label=curves.recipe)
    _finish(figure, axes, path, outside=True)


def _finish(figure: Figure, axes: mpl.axes.Axes, path: Path, outside: bool = False) -> None:
    axes.set(xlabel="iteration", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if outside else {"loc": "lower right"}
    axes.legend(fontsize=7, **place)
    save_svg(figure, path)
