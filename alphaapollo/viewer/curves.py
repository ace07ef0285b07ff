"""Curves of metrics over the iterations of one or several runs, as traces of plotly."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from alphaapollo.utils.json_types import JsonObject
from alphaapollo.viewer.index import KIND_NAMES
from alphaapollo.viewer.run_folders import make_run_name, read_flat_config

MAX_CURVES = 16
MAX_POINTS = 1000  # points of a drawn curve
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")  # Okabe and Ito
DASHES = ("solid", "dash", "dot", "dashdot")
IGNORED = re.compile(r"seed|trainer\.(experiment_name|project_name|output_dir)|_files$|model\.path$")


@dataclass(frozen=True)
class Curve:
    """Values of a metric in the order of the steps, [N] each, and its 95 % intervals."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    band: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))  # [M, 3]: step, low, high


def read_curve(database: sqlite3.Connection, run: int, metric: str, name: str) -> Curve:
    """Read a metric of a run from the index, and its interval if it has one: the metrics `METRIC/low` and
    `METRIC/high`."""
    query = "SELECT step, value FROM metrics WHERE run = ? AND name = ? ORDER BY step"
    values, low, high = (
        np.array([tuple(row) for row in database.execute(query, (run, metric + end))], dtype=np.float64).reshape(-1, 2)
        for end in ("", "/low", "/high")
    )
    bands = [np.column_stack([low, high[:, 1]])] if len(low) == len(high) else []
    return Curve(name, values[:, 0], values[:, 1], *bands)


def read_mean_curve(database: sqlite3.Connection, name: str, runs: Sequence[int], metric: str) -> Curve:
    """Read the curve of a group of runs: that of its only run with the metric, or their mean. Empty without values."""
    curves = [curve for run in runs if len((curve := read_curve(database, run, metric, name)).steps)]
    if len(curves) > 1:
        return average_over_seeds(name, curves)
    return curves[0] if curves else Curve(name, np.empty(0), np.empty(0))


def make_metric_traces(
    database: sqlite3.Connection, groups: Mapping[str, Sequence[int]], metric: str, smoothing: float
) -> list[JsonObject]:
    """Return the traces of a metric: a curve for each group of runs, which is their mean if there are several."""
    traces: list[JsonObject] = []
    for number, (name, runs) in enumerate(list(groups.items())[:MAX_CURVES]):
        curve = read_mean_curve(database, name, runs, metric)
        if smoothing and len(runs) == 1:
            traces += make_traces(Curve(name, curve.steps, smooth(curve.values, smoothing)), number, raw=curve)
        elif len(curve.steps):
            traces += make_traces(curve, number)
    return traces


def make_prompt_traces(database: sqlite3.Connection, run: int, prompt: int, source: str) -> list[JsonObject]:
    """Return the traces of the rewards of a prompt by iteration, for each kind of trajectories: samples, and mean."""
    query = "SELECT kind, step, reward FROM trajectories WHERE run = ? AND prompt_id = ? AND data_source = ?"
    rows = map(tuple, database.execute(f"{query} AND reward IS NOT NULL ORDER BY step", (run, prompt, source)))
    samples, traces = pd.DataFrame(rows, columns=["kind", "step", "reward"]), list[JsonObject]()
    for number, (kind, of_kind) in enumerate(samples.groupby("kind", sort=False)):
        curves = (of_kind.groupby("step")["reward"].mean(), of_kind.set_index("step")["reward"])
        name = KIND_NAMES.get(str(kind), str(kind))
        mean, raw = (Curve(name, one.index.to_numpy(float), one.to_numpy(float)) for one in curves)
        traces += make_traces(mean, number, raw)
    return traces


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Compute the exponential moving average without bias at the start, as TensorBoard does. 0 <= weight < 1.

    >>> smooth(np.array([1.0, 0.0, 0.0]), 0.5).round(3).tolist()
    [1.0, 0.333, 0.143]
    """
    return pd.Series(values).ewm(alpha=1 - weight).mean().to_numpy()


def thin_out(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Keep the lowest and the highest value of each of `max_points / 2` equal parts, so that no peak is lost."""
    if len(curve.steps) <= max_points:
        return curve
    parts = np.array_split(np.arange(len(curve.steps)), max_points // 2)
    kept = {int(part[at]) for part in parts for at in (curve.values[part].argmin(), curve.values[part].argmax())}
    kept |= {0, len(curve.steps) - 1}
    chosen = sorted(kept)
    return Curve(curve.name, curve.steps[chosen], curve.values[chosen], curve.band)


def average_over_seeds(name: str, curves: Sequence[Curve]) -> Curve:
    """Return the mean of the curves at the steps that all of them have, with its intervals by Student's t."""
    steps = reduce(np.intersect1d, [curve.steps for curve in curves])
    values = np.stack([curve.values[np.isin(curve.steps, steps)] for curve in curves])
    mean = values.mean(axis=0)
    width = student_t.ppf(0.975, len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return Curve(name, steps, mean, np.column_stack([steps, mean - width, mean + width]))


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


def make_traces(curve: Curve, number: int, raw: Curve | None = None) -> list[JsonObject]:
    """Return the traces of a curve: its intervals and raw points if there are any, and the line."""
    color, dash = PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]
    shared = {"type": "scatter", "name": curve.name, "legendgroup": curve.name, "showlegend": False}
    traces: list[JsonObject] = []
    if len(curve.band) > 1:
        steps, low, high = curve.band.T
        edges = {"x": [*steps, *steps[::-1]], "y": [*high, *low[::-1]], "mode": "lines"}
        area = {"fill": "toself", "fillcolor": f"{color}33", "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append(shared | edges | area)
    if raw is not None:
        raw = thin_out(raw)
        points = {"x": raw.steps.tolist(), "y": raw.values.tolist(), "mode": "markers", "hoverinfo": "skip"}
        traces.append(shared | points | {"marker": {"color": color, "size": 3, "opacity": 0.35}})
    curve = thin_out(curve)
    mode = "lines+markers" if len(curve.steps) <= 30 else "lines"
    line = {"x": curve.steps.tolist(), "y": curve.values.tolist(), "mode": mode, "showlegend": True}
    return [*traces, shared | line | {"line": {"color": color, "dash": dash, "width": 2}}]
