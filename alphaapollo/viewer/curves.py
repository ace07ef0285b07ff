"""Curves of metrics over the iterations of one or several runs, as traces of plotly."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from alphaapollo.viewer.run_folders import make_run_name, read_flat_config

MAX_POINTS = 1000  # points of a drawn curve
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")  # Okabe and Ito
DASHES = ("solid", "dash", "dot", "dashdot")
IGNORED = re.compile(r"seed|trainer\.(experiment_name|project_name|output_dir)|_files$|model\.path$")


@dataclass(frozen=True)
class Curve:
    """Values of a metric. Arrays [N], in the order of the steps."""

    name: str
    steps: np.ndarray
    values: np.ndarray


def read_curve(database: sqlite3.Connection, run: int, metric: str, name: str) -> Curve:
    """Read a metric of a run from the index."""
    query = "SELECT step, value FROM metrics WHERE run = ? AND name = ? ORDER BY step"
    rows = np.array([tuple(row) for row in database.execute(query, (run, metric))], dtype=np.float64).reshape(-1, 2)
    return Curve(name, rows[:, 0], rows[:, 1])


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Compute the exponential moving average without bias at the start, as TensorBoard does. 0 <= weight < 1.

    >>> smooth(np.array([1.0, 0.0, 0.0]), 0.5).round(3).tolist()
    [1.0, 0.333, 0.143]
    """
    average, total, smoothed = 0.0, 0.0, np.empty(len(values))
    for index, value in enumerate(values):
        average = average * weight + (1 - weight) * value
        total = total * weight + (1 - weight)
        smoothed[index] = average / total
    return smoothed


def thin_out(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Keep the lowest and the highest value of each of `max_points / 2` equal parts, so that no peak is lost."""
    if len(curve.steps) <= max_points:
        return curve
    parts = np.array_split(np.arange(len(curve.steps)), max_points // 2)
    kept = {int(part[at]) for part in parts for at in (curve.values[part].argmin(), curve.values[part].argmax())}
    kept |= {0, len(curve.steps) - 1}
    chosen = sorted(kept)
    return Curve(curve.name, curve.steps[chosen], curve.values[chosen])


def average_over_seeds(name: str, curves: Sequence[Curve]) -> tuple[Curve, np.ndarray]:
    """Return the mean of the curves at the steps that all of them have, and half the width of its 95 % interval.

    The interval is that of Student's t distribution.
    """
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    values = np.stack([curve.values[np.isin(curve.steps, steps)] for curve in curves])
    width = student_t.ppf(0.975, len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return Curve(name, steps, values.mean(axis=0)), width


def group_by_seed(folders: Mapping[int, Path], root: Path) -> dict[str, list[int]]:
    """Group the runs whose configurations differ only in seeds, names and paths. Returns the runs by name of the group,
    which is the name of its first run."""
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for run, folder in folders.items():
        config = read_flat_config(folder)
        key = tuple(sorted((name, value) for name, value in config.items() if not IGNORED.search(name)))
        groups[key or (run,)].append(run)
    names = {run: make_run_name(folder, root) for run, folder in folders.items()}
    return {
        names[runs[0]] + (f" and {len(runs) - 1} more seeds" if len(runs) > 1 else ""): runs for runs in groups.values()
    }


def make_traces(curve: Curve, number: int, smoothing: float, width: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Return the traces of a curve: its interval or raw points if there are any, and the (smoothed) line."""
    color, dash = PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]
    shared = {"type": "scatter", "name": curve.name, "legendgroup": curve.name, "showlegend": False}
    traces: list[dict[str, Any]] = []
    if width is not None:
        steps = np.concatenate([curve.steps, curve.steps[::-1]])
        edges = np.concatenate([curve.values + width, (curve.values - width)[::-1]])
        area = {"fill": "toself", "fillcolor": f"{color}33", "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append(shared | {"x": steps.tolist(), "y": edges.tolist(), "mode": "lines"} | area)
    if smoothing:
        raw = thin_out(curve)
        points = {"x": raw.steps.tolist(), "y": raw.values.tolist(), "mode": "markers", "hoverinfo": "skip"}
        traces.append(shared | points | {"marker": {"color": color, "size": 3, "opacity": 0.35}})
        curve = Curve(curve.name, curve.steps, smooth(curve.values, smoothing))
    curve = thin_out(curve)
    mode = "lines+markers" if len(curve.steps) <= 30 else "lines"
    line = {"x": curve.steps.tolist(), "y": curve.values.tolist(), "mode": mode, "showlegend": True}
    return [*traces, shared | line | {"line": {"color": color, "dash": dash, "width": 2}}]
