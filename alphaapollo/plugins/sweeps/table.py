"""Compare the settings of a sweep: means over seeds, their order, tables, curves, and the best run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from alphaapollo.config.metrics import describe_axis, is_lower_better, list_end_metrics
from alphaapollo.observability.curve import Curve, plot_curves_as_figure, read_curves, save_figure
from alphaapollo.plugins.viewer.curves import MAX_CURVES, average_curves, make_estimate
from alphaapollo.plugins.viewer.formats import format_estimate
from alphaapollo.runs.metrics_file import read_metrics
from alphaapollo.runs.newest_model import find_newest_model


def choose_metric(folders: Iterable[Path], metric: str | None) -> str:
    """Return `metric`, or the first main metric that the runs have. Raises ValueError if no run has it."""
    names = set[str]()
    for folder in folders:
        with suppress(OSError):  # a run that failed before its first iteration
            records = read_metrics(folder / "metrics.jsonl")
            names |= {name for record in records for name, value in record.items() if value is not None}
    found = next((name for name in ([metric] if metric else chain(*list_end_metrics())) if name in names), None)
    if found is None:
        known = ", ".join(sorted(names - {"step"})) or "none, see the errors above"
        raise ValueError(f"--metric {metric or 'val/accuracy'}: no run has it. Metrics of the runs: {known}.")
    return found


def read_mean_curve(metric: str, folders: Iterable[Path], last_step: float = math.inf) -> Curve:
    """Read a metric up to a step: of a run, or the mean of several with 95 % intervals. Empty without values."""
    curves = []
    for folder in folders:
        with suppress(OSError, ValueError):  # the run does not have the metric
            curve = read_curves(folder / "metrics.jsonl", [metric])[metric]
            is_shown = curve.steps <= last_step
            curves.append(Curve("", curve.steps[is_shown], curve.values[is_shown]))
    return average_curves("", curves, metric)


def rank_settings(curves: Mapping[str, Curve], metric: str) -> list[str]:
    """Return the settings, the best last value first. Equal ones keep their order; those without a value are last."""
    sign, values = 1 if is_lower_better(metric) else -1, {name: curve.values[-1:] for name, curve in curves.items()}
    return sorted(curves, key=lambda name: sign * values[name][0] if np.isfinite(values[name]).any() else math.inf)


def write_results(
    folder: Path,
    settings: Mapping[str, Sequence[Path]],
    states: Mapping[str, str],
    metric: str,
    figure: Path | None = None,
) -> tuple[pd.DataFrame, str]:
    """Write sweep.csv, sweep_runs.csv and sweep.png to the folder, and the plot also to `figure`. Returns the table,
    with the best setting first, and a sentence about the best setting.

    settings: folders of the runs that differ only in seeds, without those that failed. states: state of each setting.
    """
    curves = {name: read_mean_curve(metric, folders) for name, folders in settings.items()}
    order = rank_settings(curves, metric)
    shared = {name: {"runs": len(settings[name]), "state": states[name]} for name in order}
    rows = [make_row(name, curves[name], metric) | shared[name] for name in order]
    table = pd.DataFrame(rows, columns=["setting", metric, "low", "high", "step", "best", "best_step", "runs", "state"])
    table = table.convert_dtypes()
    table.to_csv(folder / "sweep.csv", index=False)
    values = [row for name in order for run in settings[name] for row in list_run_values(name, run)]
    columns = ["setting", "run", "metric", "step", "value"]
    pd.DataFrame(values, columns=columns).to_csv(folder / "sweep_runs.csv", index=False)
    drawn = {name: curves[name] for name in order[:MAX_CURVES] if len(curves[name].steps)}
    for path in filter(None, (folder / "sweep.png", figure)):
        save_figure(plot_curves_as_figure(drawn, metric, y_label=describe_axis([metric])), path)
    return table, describe_best(order[0], settings[order[0]], curves[order[0]], metric)


def list_run_values(setting: str, run: Path) -> Iterator[tuple[str, str, str, int, float]]:
    """Yield (setting, name of the run, metric, step, value): the last value of each metric that the run has."""
    last = dict[str, tuple[int, float]]()
    with suppress(OSError):
        for record in read_metrics(run / "metrics.jsonl"):
            last |= {name: (int(record["step"]), value) for name, value in record.items() if value is not None}
    yield from ((setting, run.name, name, *last[name]) for name in sorted(last.keys() - {"step"}))


def describe_best(setting: str, runs: Sequence[Path], mean: Curve, metric: str) -> str:
    """Describe the best setting with its interval, its best run, and the path of the model of this run."""
    curves = {run.name: read_mean_curve(metric, [run]) for run in runs}
    if not len(mean.steps):
        return "no setting has a value"
    best = rank_settings(curves, metric)[0]
    folder = next(run for run in runs if run.name == best)
    try:
        newest = find_newest_model(folder)
        model = f"model: {newest.source or newest.model_folder}"
    except ValueError:
        model = "without a model: it has neither a checkpoint nor an exported model"
    value = format_estimate(make_estimate(mean)) + f" as the mean of {len(runs)} runs" * (len(runs) > 1)
    return f"best setting: {setting}, {metric} {value}; its best run: {best} ({curves[best].values[-1]:.4g}), {model}"


def write_latex(table: pd.DataFrame, metric: str, path: Path) -> None:
    """Write setting, value with its 95 % interval, step and number of runs as a table for LaTeX's package booktabs."""
    rows = []
    for row in table.astype(object).where(table.notna(), None).to_dict("records"):
        value, low, high = ("" if row[name] is None else f"{row[name]:.4g}" for name in (metric, "low", "high"))
        rows.append((row["setting"], value or "-", f"[{low}, {high}]" if low else "-", row["step"], row["runs"]))
    shown = pd.DataFrame(rows, columns=["setting", metric, "95 % interval", "step", "runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(shown.to_latex(index=False, escape=True, column_format="lrlrr", na_rep="-"), encoding="utf-8")


def make_row(setting: str, curve: Curve, metric: str) -> dict[str, object]:
    """Return the row of a setting: its last value with the interval, and its best value."""
    if not len(curve.steps):
        return {"setting": setting}
    last, best = make_estimate(curve), (np.argmin if is_lower_better(metric) else np.argmax)(curve.values)
    row = {"setting": setting, metric: last.value, "low": last.low, "high": last.high, "step": int(curve.steps[-1])}
    return row | {"best": float(curve.values[best]), "best_step": int(curve.steps[best])}
