"""Curves of metrics over the iterations of one or several runs, as traces of plotly."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from alphaapollo.config.metrics import find_bounds, is_lower_better, load_catalogue
from alphaapollo.observability.curve import DASHES, PALETTE, Curve
from alphaapollo.observability.sample_metrics import CORRECT_ACCURACY, Estimate, estimate_means
from alphaapollo.plugins.viewer.index import KIND_NAMES
from alphaapollo.utils.json_types import JsonObject

COMPONENT = "/component/"  # in names of the metrics of reward components, which follow those of the reward
MAX_CURVES = 16
MAX_BANDS = 24  # iterations with an interval, per kind of samples
MAX_COLUMNS = 60  # iterations of a histogram
NUM_BINS = 20  # of a histogram
FIGURES = ("accuracy", "reward", "response_length")  # means over prompts, which have intervals
MAX_POINTS = 1000  # points of a drawn curve
MIN_RUNS_OF_BAND = 4  # a mean of fewer runs is drawn with their lines: two have a t interval of 13 standard errors
T = TypeVar("T")


def read_curve(database: sqlite3.Connection, run: int, metric: str, name: str) -> Curve:
    """Read a metric of a run from the index, and its interval if it has one: the metrics `METRIC/low` and
    `METRIC/high`."""
    query = "SELECT step, value FROM metrics WHERE run = ? AND name = ? ORDER BY step"
    values, low, high = (
        np.array([tuple(row) for row in database.execute(query, (run, metric + end))], dtype=np.float64).reshape(-1, 2)
        for end in ("", "/low", "/high")
    )
    band = np.column_stack([low, high[:, 1]]) if len(low) == len(high) else np.empty((0, 3))
    return Curve(name, values[:, 0], values[:, 1], band)


def read_mean_curve(
    database: sqlite3.Connection,
    name: str,
    runs: Sequence[int],
    metric: str,
    make_band: Callable[[sqlite3.Connection, int, str, str], np.ndarray] | None = None,
) -> Curve:
    """Read the curve of a group of runs: that of its only run with the metric, or their mean. Empty without values.

    make_band: computes the intervals over prompts of a single run, if the metric is a mean over prompts.
    """
    curve = average_curves(name, [read_curve(database, run, metric, name) for run in runs], metric)
    figure = (find_validation(metric) or metric).removeprefix("val/")
    if make_band and len(runs) == 1 and figure in FIGURES and not len(curve.band):
        kind = "val" if metric.startswith("val/") else "step"
        return replace(curve, band=make_band(database, runs[0], kind, figure))
    return curve


def average_curves(name: str, curves: Sequence[Curve], metric: str) -> Curve:
    """Return the only curve with values, or the mean of several with 95 % intervals. Empty without values."""
    curves = [curve for curve in curves if len(curve.steps)]
    if len(curves) > 1:
        return limit_band(average_over_seeds(name, curves), metric)
    return curves[0] if curves else Curve(name, np.empty(0), np.empty(0))


def limit_band(curve: Curve, metric: str) -> Curve:
    """Limit the intervals of a metric to the values that it can have."""
    low, high = find_bounds(metric)
    if not ((curve.values >= low) & (curve.values <= high)).all():
        return curve  # another metric of this name
    return replace(curve, band=np.column_stack([curve.band[:, :1], curve.band[:, 1:].clip(low, high)]))


def find_validation(metric: str) -> str:
    """Return the name that a training metric has in validations; empty for other metrics."""
    (group, _, name), main = metric.partition("/"), load_catalogue().main.get(metric)
    return (main.validation if main else "") or f"val/{name}" * (group in ("reward", "train"))


def list_metrics(database: sqlite3.Connection, run: int) -> list[str]:
    """List the metrics of a run. Jumps from name to name, because a run may have millions of values."""
    names, query = [""], "SELECT min(name) FROM metrics WHERE run = ? AND name > ?"
    while (name := database.execute(query, (run, names[-1])).fetchone()[0]) is not None:
        names.append(name)
    return names[1:]


def choose_curves(
    database: sqlite3.Connection, runs: Sequence[int], names: Collection[str], limit: int | None = None
) -> tuple[list[str], dict[str, float]]:
    """Choose reward components and up to `limit` main curves of these metrics, the first one of equal curves. Also
    return those that are constant, with their values."""
    main_curves = [name for name, metric in load_catalogue().main.items() if metric.curve]
    at = main_curves.index("train/accuracy")
    ordered = [*main_curves[:at], *(name for name in sorted(names) if COMPONENT in name), *main_curves[at:]]
    drawn = [name for name in ordered if name in names]
    summaries = summarize_values(database, runs, drawn)
    constants = find_constants(summaries, runs)
    different = {summaries[name]: name for name in drawn[::-1] if name not in constants}
    chosen = sorted(different.values(), key=ordered.index)
    main = [name for name in chosen if COMPONENT not in name][:limit]
    return [name for name in chosen if COMPONENT in name or name in main], constants


def find_constants(summaries: Mapping[str, Sequence[float]], runs: Sequence[int]) -> dict[str, float]:
    """Return the value of each metric that has not changed over several iterations and is the same in all runs."""
    return {name: low for name, (count, low, high, *_) in summaries.items() if count > len(runs) and low == high}


def summarize_values(
    database: sqlite3.Connection, runs: Sequence[int], names: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    """Return the number of values of each metric, the lowest and the highest one, and sums that equal curves share."""
    sums = "total(value), total(value * (step + 0.1 * run))"
    query = f"SELECT count(*), min(value), max(value), {sums} FROM metrics WHERE name = ? AND run IN "
    query, ids = f"{query} (SELECT value FROM json_each(?))", json.dumps(list(runs))
    rows = {name: database.execute(query, (name, ids)).fetchone() for name in names}
    return {name: tuple(float(f"{value or 0:.9g}") for value in row) for name, row in rows.items()}


def list_final_values(
    database: sqlite3.Connection, groups: Mapping[str, Sequence[int]], metrics: Sequence[str]
) -> list[tuple[str, list[Estimate | None]]]:
    """Return the last values of the groups, with the intervals of their curves, the best group by `val/accuracy` first;
    without this metric, the best one by the first metric."""
    rows = []
    for name, runs in groups.items():
        curves = [read_mean_curve(database, name, runs, metric) for metric in metrics]
        rows.append((name, [make_estimate(curve) if len(curve.steps) else None for curve in curves]))
    key = metrics.index("val/accuracy") if "val/accuracy" in metrics else 0
    sign = 1 if metrics and is_lower_better(metrics[key]) else -1
    values = {name: estimate.value for name, row in rows for estimate in row[key : key + 1] if estimate}
    return sorted(rows, key=lambda row: sign * values.get(row[0], sign * math.inf))


def make_estimate(curve: Curve, at: int = -1) -> Estimate:
    """Return the last value of a curve, or the one at another index, with its interval if it has one."""
    bounds = {step: (low, high) for step, low, high in curve.band.tolist()}
    return Estimate(float(curve.values[at]), *bounds.get(curve.steps[at], (None, None)), 0)


def make_metric_traces(
    database: sqlite3.Connection, groups: Mapping[str, Sequence[int]], metric: str, smoothing: float
) -> list[JsonObject]:
    """Return the traces of a metric: a curve for each group of runs, which is their mean if there are several. The only
    run also has intervals over prompts, and its validations."""
    traces: list[JsonObject] = []
    single = [runs[0] for runs in groups.values()] if sum(map(len, groups.values())) == 1 else []
    for number, (name, runs) in enumerate(list(groups.items())[:MAX_CURVES]):
        curve, raw = read_mean_curve(database, name, runs, metric, estimate_band if single else None), None
        if smoothing and len(runs) == 1:
            curve, raw = replace(curve, values=smooth(curve.values, smoothing)), curve
        traces += make_traces(curve, number, raw) if len(curve.steps) else []
    validations = [read_curve(database, run, find_validation(metric), "validation") for run in single]
    for line in (make_traces(curve, 1)[-1] for curve in validations if len(curve.steps)):
        marks = {"symbol": "diamond", "size": 8, "color": PALETTE[1]}
        dotted = {"mode": "lines+markers", "marker": marks, "line": line["line"] | {"dash": "dot", "width": 1}}
        traces = [*(trace | {"name": "training", "legendgroup": "training"} for trace in traces), line | dotted]
    return traces


def tabulate(database: sqlite3.Connection, runs: Sequence[int], kind: str, step: int) -> pd.DataFrame:
    """Return the FIGURES (columns) of each prompt of an iteration, and how many samples have an accuracy and are right.
    Equal prompts are one, with more samples. Accuracies are NaN if that of any graded sample is unknown."""
    accuracy = "iif(count(accuracy) = count(reward), avg(accuracy), NULL)"
    columns = f"{accuracy}, avg(reward), avg(tokens), count(accuracy), total(accuracy >= {CORRECT_ACCURACY})"
    query = f"SELECT data_source, question, {columns} FROM trajectories WHERE kind = ? AND step = ? AND run IN "
    query += "(SELECT value FROM json_each(?)) GROUP BY 1, 2"
    rows = [tuple(row) for row in database.execute(query, (kind, step, json.dumps(list(runs))))]
    index = ["source", "question"]
    table = pd.DataFrame(rows, columns=[*index, *FIGURES, "samples", "right"]).set_index(index).astype(float)
    is_unknown = bool((table["accuracy"].isna() & table["reward"].notna()).any())
    return table.assign(accuracy=np.nan) if is_unknown else table


def list_steps(database: sqlite3.Connection, run: int, kind: str) -> list[int]:
    """List the iterations that have samples of a kind."""
    query = "SELECT DISTINCT step FROM texts WHERE run = ? AND kind = ? ORDER BY step"
    return [row["step"] for row in database.execute(query, (run, kind))]


def choose_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return up to `count` items at equal distances, including the first and the last."""
    return [items[at] for at in np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)]


def compute_band(database: sqlite3.Connection, run: int, kind: str, figure: str) -> np.ndarray:
    """Compute intervals of a mean over prompts (step, low, high), [M, 3], evenly spread over the iterations."""
    steps = choose_evenly(list_steps(database, run, kind), MAX_BANDS)
    means = [(step, estimate_means(tabulate(database, [run], kind, step)[[figure]].to_numpy())[0]) for step in steps]
    rows = [(step, mean.low, mean.high) for step, mean in means if mean and mean.low is not None]
    return np.array(rows, dtype=float).reshape(-1, 3)


def estimate_band(database: sqlite3.Connection, run: int, kind: str, figure: str) -> np.ndarray:
    """Estimate the intervals of `compute_band` by Student's t over prompts, which takes milliseconds. Like those, they
    end at the lowest and the highest mean of a prompt."""
    column = {"response_length": "tokens"}.get(figure, figure)
    of_prompts = f"SELECT avg({column}) AS x FROM trajectories WHERE run = ? AND kind = ? AND step = ? "
    query = f"SELECT count(x), avg(x), avg(x * x), min(x), max(x) FROM ({of_prompts} GROUP BY data_source, question)"
    steps = choose_evenly(list_steps(database, run, kind), MAX_BANDS)
    rows = [(step, *database.execute(query, (run, kind, step)).fetchone()) for step in steps]
    moments = np.array([row for row in rows if row[1] > 1], dtype=float).reshape(-1, 6)
    step, count, mean, square, low, high = moments.T
    width = student_t.ppf(0.975, count - 1) * np.sqrt(np.maximum(square - mean**2, 0) / (count - 1))
    return np.column_stack([step, np.maximum(mean - width, low), np.minimum(mean + width, high)])


def make_histogram_traces(database: sqlite3.Connection, run: int, kind: str, column: str) -> list[JsonObject]:
    """Return a heat map of the rewards or tokens of samples: share of the samples of each iteration in each bin."""
    if column not in ("reward", "tokens"):
        raise ValueError(f"There is no histogram of {column}. Choose reward or tokens.")
    query = f"SELECT {column} FROM trajectories WHERE run = ? AND kind = ? AND step = ? AND {column} IS NOT NULL"
    steps = choose_evenly(list_steps(database, run, kind), MAX_COLUMNS)
    columns = [np.array(database.execute(query, (run, kind, step)).fetchall(), float).ravel() for step in steps]
    values = np.concatenate([*columns, np.empty(0)])
    values = values[np.isfinite(values)]
    if not values.size or values.min() == values.max():
        return []
    low, high = np.quantile(values, [0, 0.999])
    num_values = len(np.unique(values[:10_000]))  # e.g. 2: right or wrong
    # A few values: a bin for each, and an empty one between neighbours.
    edges = np.linspace(low, high, NUM_BINS + 1 if num_values > 3 else 2 * num_values)
    shares = [
        np.histogram(np.clip(step_values, low, high), edges)[0] / max(len(step_values), 1) for step_values in columns
    ]
    middles = (edges[1:] + edges[:-1]) / 2
    shown = {"x": steps, "y": middles.tolist(), "z": np.transpose(shares).tolist(), "showscale": False}
    return [{"type": "heatmap", "name": column, "hovertemplate": "%{y:.3g}: %{z:.0%}<extra></extra>", **shown}]


def make_prompt_traces(database: sqlite3.Connection, run: int, question: int) -> list[JsonObject]:
    """Return the traces of the rewards of a prompt by iteration, for each kind of trajectories: samples, and mean.
    question: digest of the prompt and its ground truth."""
    query = "SELECT kind, step, reward FROM trajectories WHERE run = ? AND question = ?"
    rows = map(tuple, database.execute(f"{query} AND reward IS NOT NULL ORDER BY step", (run, question)))
    samples, traces = pd.DataFrame(rows, columns=["kind", "step", "reward"]), list[JsonObject]()
    for number, (kind, of_kind) in enumerate(samples.groupby("kind", sort=False)):
        curves = (of_kind.groupby("step")["reward"].mean(), of_kind.set_index("step")["reward"])
        name = KIND_NAMES.get(str(kind), str(kind))
        mean, raw = (Curve(name, series.index.to_numpy(float), series.to_numpy(float)) for series in curves)
        traces += make_traces(mean, number, raw)
    return traces


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Compute the exponential moving average without bias at the start, as TensorBoard does. 0 <= weight < 1.

    >>> smooth(np.array([1.0, 0.0, 0.0]), 0.75).round(3).tolist()
    [1.0, 0.429, 0.243]
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
    runs = [thin_out(run, max_points) for run in curve.runs]
    return replace(curve, steps=curve.steps[chosen], values=curve.values[chosen], runs=runs)


def average_over_seeds(name: str, curves: Sequence[Curve]) -> Curve:
    """Return the mean of the curves at the steps that all of them have, with its intervals by Student's t, and
    few curves (MIN_RUNS_OF_BAND) themselves."""
    steps = reduce(np.intersect1d, [curve.steps for curve in curves])
    values = np.stack([curve.values[np.isin(curve.steps, steps)] for curve in curves])
    mean = values.mean(axis=0)
    width = student_t.ppf(0.975, len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    band = np.column_stack([steps, mean - width, mean + width])
    return Curve(name, steps, mean, band, curves if len(curves) < MIN_RUNS_OF_BAND else ())


def make_traces(curve: Curve, number: int, raw: Curve | None = None) -> list[JsonObject]:
    """Return the traces of a curve: its runs or intervals and raw points if there are any, and the line."""
    color, dash = PALETTE[number % len(PALETTE)], [*DASHES][number // len(PALETTE) % len(DASHES)]
    shared = {"type": "scatter", "name": curve.name, "legendgroup": curve.name, "showlegend": False}
    traces: list[JsonObject] = []
    for run in map(thin_out, curve.runs):
        thin = {"x": run.steps.tolist(), "y": run.values.tolist(), "mode": "lines", "hoverinfo": "skip"}
        traces.append(shared | thin | {"opacity": 0.45, "line": {"color": color, "dash": dash, "width": 1}})
    if len(curve.band) > 1 and not curve.runs:
        steps, low, high = curve.band.T
        edges = {"x": [*steps, *steps[::-1]], "y": [*high, *low[::-1]], "mode": "lines"}
        area = {"fill": "toself", "fillcolor": f"{color}22", "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append(shared | edges | area)
    if raw is not None:
        raw = thin_out(raw)
        points = {"x": raw.steps.tolist(), "y": raw.values.tolist(), "mode": "markers", "hoverinfo": "skip"}
        traces.append(shared | points | {"marker": {"color": color, "size": 3, "opacity": 0.35}})
    curve = thin_out(curve)
    mode = "lines+markers" if len(curve.steps) <= 30 else "lines"
    line = {"x": curve.steps.tolist(), "y": curve.values.tolist(), "mode": mode, "showlegend": True}
    return [*traces, shared | line | {"line": {"color": color, "dash": dash, "width": 2}}]
