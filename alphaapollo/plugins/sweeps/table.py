"""Compare the settings of a sweep: means over seeds, their order, table and curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from alphaapollo.config.metrics import describe_axis, is_lower_better, list_end_metrics
from alphaapollo.observability.curve import Curve, plot_curves_as_figure, read_curves
from alphaapollo.plugins.viewer.curves import MAX_CURVES, average_curves, make_estimate
from alphaapollo.runs.metrics_file import read_metrics


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
    folder: Path, settings: Mapping[str, Sequence[Path]], states: Mapping[str, str], metric: str
) -> pd.DataFrame:
    """Write sweep.csv and sweep.png to the folder. Returns the table, with the best setting first.

    settings: folders of the runs that differ only in seeds, without those that failed. states: state of each setting.
    """
    curves = {name: read_mean_curve(metric, folders) for name, folders in settings.items()}
    order = rank_settings(curves, metric)
    rows = [make_row(name, curves[name], metric) | {"state": states[name]} for name in order]
    table = pd.DataFrame(rows, columns=["setting", metric, "low", "high", "step", "best", "best_step", "state"])
    table = table.convert_dtypes()
    table.to_csv(folder / "sweep.csv", index=False)
    drawn = {name: curves[name] for name in order[:MAX_CURVES] if len(curves[name].steps)}
    plot_curves_as_figure(drawn, metric, y_label=describe_axis([metric])).savefig(folder / "sweep.png", dpi=150)
    return table


def make_row(setting: str, curve: Curve, metric: str) -> dict[str, object]:
    """Return the row of a setting: its last value with the interval, and its best value."""
    if not len(curve.steps):
        return {"setting": setting}
    last, best = make_estimate(curve), (np.argmin if is_lower_better(metric) else np.argmax)(curve.values)
    row = {"setting": setting, metric: last.value, "low": last.low, "high": last.high, "step": int(curve.steps[-1])}
    return row | {"best": float(curve.values[best]), "best_step": int(curve.steps[best])}
