"""Curves of metrics over the iterations of one or several runs, as traces of plotly."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import t as student_t

from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer.index import KIND_NAMES
from alphaapollo.viewer.run_folders import make_run_name, read_flat_config

MAX_CURVES = 16
MAX_POINTS = 1000  # points of a drawn curve
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")  # Okabe and Ito
DASHES = ("solid", "dash", "dot", "dashdot")
IGNORED = re.compile(r"seed|trainer\.(experiment_name|project_name|output_dir)|_files$|model\.path$")


Interval = tuple[np.ndarray, np.ndarray]
"""Low and high ends at the steps of a curve, [N] each."""


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


def read_interval(database: sqlite3.Connection, run: int, metric: str, curve: Curve) -> Interval | None:
    """Read the interval of a metric that has one, i.e. the metrics `METRIC/low` and `METRIC/high`."""
    low, high = (read_curve(database, run, f"{metric}/{end}", "").values for end in ("low", "high"))
    return (low, high) if len(low) == len(high) == len(curve.steps) > 1 else None


def make_metric_traces(
    database: sqlite3.Connection, groups: Mapping[str, Sequence[int]], metric: str, smoothing: float
) -> list[JsonObject]:
    """Return the traces of a metric: a curve for each group of runs, which is their mean if there are several."""
    traces: list[JsonObject] = []
    for number, (name, runs) in enumerate(list(groups.items())[:MAX_CURVES]):
        curves = [curve for run in runs if len((curve := read_curve(database, run, metric, name)).steps)]
        if len(curves) > 1:
            curve, width = average_over_seeds(name, curves)
            traces += make_traces(curve, number, (curve.values - width, curve.values + width))
        elif curves and smoothing:
            line = Curve(name, curves[0].steps, smooth(curves[0].values, smoothing))
            traces += make_traces(line, number, raw=curves[0])
        elif curves:
            traces += make_traces(curves[0], number, read_interval(database, runs[0], metric, curves[0]))
    return traces


def make_prompt_traces(database: sqlite3.Connection, run: int, prompt: int, source: str) -> list[JsonObject]:
    """Return the traces of the rewards of a prompt by iteration, for each kind of trajectories: samples, and mean."""
    query = "SELECT kind, step, reward FROM trajectories WHERE run = ? AND prompt_id = ? AND data_source = ?"
    rewards: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for kind, step, reward in database.execute(f"{query} AND reward IS NOT NULL ORDER BY step", (run, prompt, source)):
        rewards[KIND_NAMES.get(kind, kind)].append((step, reward))
    traces = []
    for number, (name, found) in enumerate(rewards.items()):
        steps, values = np.array(found, dtype=np.float64).T
        at, group = np.unique(steps, return_inverse=True)
        mean = np.bincount(group, values) / np.bincount(group)
        traces += make_traces(Curve(name, at, mean), number, raw=Curve(name, steps, values))
    return traces


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
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for run, folder in folders.items():
        config = read_flat_config(folder)
        key = tuple(sorted((name, value) for name, value in config.items() if not IGNORED.search(name)))
        groups[key or (run,)].append(run)
    names = {run: make_run_name(folder, root) for run, folder in folders.items()}
    return {
        names[runs[0]] + (f" and {len(runs) - 1} more seeds" if len(runs) > 1 else ""): runs for runs in groups.values()
    }


def make_traces(
    curve: Curve, number: int, interval: Interval | None = None, raw: Curve | None = None
) -> list[JsonObject]:
    """Return the traces of a curve: its interval and raw points if there are any, and the line."""
    color, dash = PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]
    shared = {"type": "scatter", "name": curve.name, "legendgroup": curve.name, "showlegend": False}
    traces: list[JsonObject] = []
    if interval is not None:
        steps = np.concatenate([curve.steps, curve.steps[::-1]])
        edges = np.concatenate([interval[1], interval[0][::-1]])
        area = {"fill": "toself", "fillcolor": f"{color}33", "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append(shared | {"x": steps.tolist(), "y": edges.tolist(), "mode": "lines"} | area)
    if raw is not None:
        raw = thin_out(raw)
        points = {"x": raw.steps.tolist(), "y": raw.values.tolist(), "mode": "markers", "hoverinfo": "skip"}
        traces.append(shared | points | {"marker": {"color": color, "size": 3, "opacity": 0.35}})
    curve = thin_out(curve)
    mode = "lines+markers" if len(curve.steps) <= 30 else "lines"
    line = {"x": curve.steps.tolist(), "y": curve.values.tolist(), "mode": mode, "showlegend": True}
    return [*traces, shared | line | {"line": {"color": color, "dash": dash, "width": 2}}]
