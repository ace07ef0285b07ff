"""Rows of the tables, charts and samples of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import combinations
from math import prod

import msgspec
import numpy as np
from scipy.stats import ttest_ind

from alphaapollo.config.changes import identify_command
from alphaapollo.evaluation.metrics import Estimate, Summary, summarize
from alphaapollo.observability.run_view import format_duration, format_time_summary
from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.model_card import list_non_default_keys
from alphaapollo.runs.run_history import read_history, read_input_digests, read_run_plan
from alphaapollo.utils.redaction import find_secret_keys_and_reasons
from alphaapollo.viewer.curves import Curve, average_over_seeds
from alphaapollo.viewer.index import KIND_NAMES
from alphaapollo.viewer.pages.runs import MAIN_CURVES
from alphaapollo.viewer.report.data import RunContent, Sample, choose_evenly, compare_results
from alphaapollo.viewer.report.formats import Chart, make_code
from alphaapollo.viewer.run_folders import read_config, read_content, read_flat_config, read_json_object

NUM_SAMPLES = 10
SUMMED = {"rollout/tokens": "sampled tokens", "actor/tokens": "trained tokens", "cost/tokens": "tokens of model calls"}
SUMMED |= {"cost/calls": "model calls", "cost/money": "money"}
Row = tuple[object, ...]
Groups = Mapping[str, Sequence[RunContent]]


def list_charts(groups: Groups) -> Iterator[Chart]:
    """Yield a chart per metric. Bands: over seeds for groups of several runs, otherwise over prompts."""
    for metric in MAIN_CURVES:
        chart = Chart(metric, {}, {})
        for name, runs in groups.items():
            curves = get_curves(runs, metric)
            if len(curves) == 1:
                chart.curves[name] = curves[0]
                chart.bands[name] = next(run.bands[metric] for run in runs if metric in run.metrics)
            elif find_last_common_values(curves):
                chart.curves[name], width = average_over_seeds(name, curves)
                steps, means = chart.curves[name].steps, chart.curves[name].values
                chart.bands[name] = list(zip(steps, means - width, means + width, strict=True))
        if chart.curves:
            yield chart


def get_curves(runs: Sequence[RunContent], metric: str) -> list[Curve]:
    """Return the curves of a metric of the runs that have it."""
    columns = [run.metrics[metric].dropna() for run in runs if metric in run.metrics]
    return [Curve(metric, one.index.to_numpy(dtype=float), one.to_numpy(dtype=float)) for one in columns]


def find_last_common_values(curves: Sequence[Curve]) -> tuple[int, np.ndarray] | None:
    """Return the last iteration that all curves have, and their values there; None if there is none."""
    steps = reduce(np.intersect1d, [curve.steps for curve in curves]) if curves else np.zeros(0)
    values = [curve.values[curve.steps == step][0] for step in steps[-1:] for curve in curves]
    return (int(steps[-1]), np.array(values)) if values else None


def list_ends(charts: Sequence[Chart]) -> Iterator[Row]:
    """Yield (metric, first value, its iteration, last value, its iteration) of each curve."""
    for chart in charts:
        for name, curve in chart.curves.items():
            bounds = {step: (low, high) for step, low, high in chart.bands[name]}
            of_name = f" of {' '.join(name.split())}" if len(chart.curves) > 1 else ""
            row: list[object] = [make_code(chart.title) + of_name]
            for at in (0, -1):
                low, high = bounds.get(curve.steps[at], (None, None))
                row += [Estimate(curve.values[at], low, high, 0), int(curve.steps[at])]
            yield tuple(row)


def list_group_differences(groups: Groups) -> Iterator[Row]:
    """Yield (metric, group, other group, difference with Welch's interval, iteration) of groups of several runs, at the
    last iteration that all runs of both groups have."""
    for metric in MAIN_CURVES:
        for first, second in combinations(groups, 2):
            old, new = (get_curves(groups[name], metric) for name in (first, second))
            common = find_last_common_values([*old, *new])
            if common and min(len(old), len(new)) > 1 and np.ptp(common[1]):
                values, others = common[1][len(old) :], common[1][: len(old)]
                low, high = ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
                mean = Estimate(values.mean() - others.mean(), low, high, 0)
                yield make_code(metric), second, first, mean, common[0]


def list_config_differences(groups: Groups) -> Iterator[Row]:
    """Yield (key, values in each group) of the keys that differ between runs, without secrets."""
    configs = [[read_flat_config(run.folder) | read_content(run.folder) for run in runs] for runs in groups.values()]
    keys = {key for own in configs for config in own for key in config}
    for runs in groups.values():
        keys -= {key for run in runs for key, _ in find_secret_keys_and_reasons(read_config(run.folder))}
    for key in sorted(keys):
        values = [dict.fromkeys(config.get(key, "-") for config in own) for own in configs]
        if len({value for own in values for value in own}) > 1:
            yield make_code(key), *map(", ".join, values)


def list_settings(run: RunContent) -> Iterator[Row]:
    """Yield (setting, value): the plan of the run, as it was printed, keys that are not the defaults, and seeds."""
    config = read_config(run.folder)
    if plan := read_run_plan(run.folder):
        yield from plan.settings.items()
    command, keys = identify_command(config), read_flat_config(run.folder)
    rows = dict(list_non_default_keys(config, command) if command else ())
    rows |= {key: value for key, value in keys.items() if key.endswith("seed")}
    yield from ((make_code(key), make_code(value)) for key, value in rows.items())


def list_changes(run: RunContent) -> Iterator[Row]:
    """Yield (samples, figure, before, after, difference) of the first and the last validation."""
    for kind in ("val", "val_greedy"):
        if len(run.results.get(kind, ())) == 2:
            for source, *change in compare_results(*run.results[kind].values()):
                yield f"{KIND_NAMES[kind]}, {source}", *change


def list_scores(run: RunContent) -> Iterator[Row]:
    """Yield (data source, metric, mean, number of problems) of an evaluation, and of all evaluation suites."""
    summaries: dict[str, Summary] = {}
    with suppress(msgspec.ValidationError):
        saved = read_json_object(run.folder / "summary.json").get("by_data_source", {})
        summaries = msgspec.convert(saved, dict[str, Summary])
    if "results" in run.results:
        summaries = summarize(run.results["results"][0])[1]
    for source, summary in summaries.items():
        yield from ((source, name, mean, mean.problems) for name, mean in summary.figures.items())
    for result in read_suite_results(run.folder):
        source = f"{result.suite}, {result.model}"
        yield from ((source, f"{score.task} {score.metric}", score.value, score.rows) for score in result.scores)


def choose_samples(run: RunContent) -> list[Sequence[Sample]]:
    """Choose up to NUM_SAMPLES prompts, evenly from the one that got worst to the one that improved most.

    Returns the first and the last answer to each; one answer, if no prompt was answered in two iterations.
    """
    kinds = ("problems", "val_greedy", "val", "step", "results")
    answers = [list(run.answers[kind].values()) for kind in kinds if kind in run.answers]
    answers = [[pair for pair in of_kind if len(pair) == 2] for of_kind in answers] + answers

    def rank(pair: Sequence[Sample]) -> tuple[float, float, str, int]:
        before, after = np.nan_to_num([pair[0].result.reward, pair[-1].result.reward])
        return after - before, after, pair[0].result.data_source, pair[0].result.problem_id

    return choose_evenly(sorted(next(filter(None, answers), []), key=rank), NUM_SAMPLES)


def list_costs(run: RunContent) -> Iterator[Row]:
    """Yield (label, cost)."""
    history, config = read_history(run.folder), read_flat_config(run.folder)
    seconds = sum(command.ended - command.started for command in history)
    yield "wall time of the commands that have ended", format_duration(seconds) if history else "not recorded"
    if history:
        sections = ("trainer", "actor_rollout_ref.rollout")  # the second has nodes of its own if its nnodes is not 0
        sizes = [[config.get(f"{section}.{key}", "0") for key in ("n_gpus_per_node", "nnodes")] for section in sections]
        uses_cpu = "+cpu" in history[-1].versions.get("torch", "") or config.get("trainer.device") == "cpu"
        uses_cpu |= "memory/policy_rss_gib" in run.metrics and "memory/policy_cuda_gib" not in run.metrics
        gpus = 0 if uses_cpu else sum(prod(int(size) if size.isdigit() else 0 for size in pair) for pair in sizes)
        yield "GPU-hours", f"{gpus * seconds / 3600:.2f} ({gpus} GPUs)" if gpus else "0 (CPU)"
    sums = {str(name): float(total) for name, total in run.metrics.sum().items()}
    if phases := format_time_summary({name: one for name, one in sums.items() if name.startswith("timing/")}):
        yield "iterations", phases
    yield from ((label, f"{sums[name]:,.0f}") for name, label in SUMMED.items() if name in sums)
    if "train/tokens" in sums:
        yield "trained tokens, about", f"{run.metrics['train/tokens'].mean() * run.metrics.index.max():,.0f}"


def list_digests(run: RunContent) -> Iterator[Row]:
    """Yield (key, file, digest) of the inputs, as recorded at the newest start of the run."""
    for key, pairs in read_input_digests(run.folder).items():
        yield from ((key, path, make_code(digest)) for path, digest in pairs)
