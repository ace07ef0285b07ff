"""Reports of runs in one file: what was trained and how, results with intervals, samples, costs, and how to repeat it.

index of the runs -> rows of tables, curves and samples -> page (templates/report.html), in which no text of a model is
markup
"""

from __future__ import annotations

import base64
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.datastructures import QueryParams

from alphaapollo.evaluation.metrics import Estimate, Summary
from alphaapollo.observability.curve import plot_curves_as_figure
from alphaapollo.observability.run_view import format_duration, format_time_summary
from alphaapollo.observability.terminal import get_last_message, shorten_text
from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.runs.run_history import read_history, read_input_digests, read_run_plan
from alphaapollo.types import JsonObject
from alphaapollo.viewer.curves import (
    Curve,
    choose_curves,
    choose_evenly,
    list_final_values,
    list_metrics,
    list_steps,
    make_estimate,
    read_group_curve,
    tabulate,
    thin_out,
)
from alphaapollo.viewer.experiments import Groups, compare_configs, compare_prompts, group_runs, list_paired_differences
from alphaapollo.viewer.formats import FILTERS
from alphaapollo.viewer.index import KIND_NAMES, RunIndex
from alphaapollo.viewer.query import Query, RunSummary, summarize_run
from alphaapollo.viewer.run_folders import MARKERS, find_runs, read_config, read_json_object, tabulate_starts
from alphaapollo.viewer.samples import read_record

HERE = Path(__file__).parent
NUM_SAMPLES = 10
MAX_CHARS = 1500  # of a text in a line or of a sample
MAX_POINTS = 300  # of a curve
SUMMED = {"rollout/tokens": "sampled tokens", "actor/tokens": "trained tokens", "cost/tokens": "tokens of model calls"}
SUMMED |= {"cost/calls": "model calls", "cost/money": "money"}
Row = tuple[object, ...]


def make_report(folders: Sequence[Path]) -> bytes:
    """Make the report of a run, or the comparison of several, as an HTML page. Raises ValueError for a folder that is
    no run."""
    folders = list(dict.fromkeys(folder.expanduser().absolute() for folder in folders))
    for folder in folders:
        check_format(folder)
        if not any((folder / name).is_file() for name in MARKERS):
            markers = ", ".join(MARKERS)
            below = ", ".join(map(str, find_runs(folder))) or "none"
            raise ValueError(
                f"{folder} is no run: it has none of {markers}. Give the folder of a run; runs in it: {below}."
            )
    root = Path(os.path.commonpath(folders))
    with TemporaryDirectory() as temporary:
        index = RunIndex(root, Path(temporary, "index.sqlite"), folders)
        with closing(index.connect()) as database:
            index.update(database)
            query = Query(database, root, {}, QueryParams())
            ids = {row["path"]: row["id"] for row in query.select("SELECT id, path FROM runs")}
            runs = [summarize_run(query, ids[str(folder)], folder) for folder in folders]
            groups = group_runs({run.id: run.folder for run in runs}, root, by_seed=True)
            metrics = {name for run in runs for name in list_metrics(database, run.id)}
            chosen, constants = choose_curves(database, [run.id for run in runs], metrics)
            return render_page(
                {
                    "query": query,
                    "title": f"Report of {runs[0].name}" if len(runs) == 1 else f"Comparison of {len(runs)} runs",
                    "runs": runs,
                    "groups": groups,
                    "charts": {metric: read_curves(database, groups, metric) for metric in chosen},
                    "constants": constants,
                    "finals": list_final_values(database, groups, chosen),
                    "pairs": list(list_paired_differences(database, groups)),
                }
            )


def render_page(values: Mapping[str, object]) -> bytes:
    """Render report.html. The page loads nothing and runs nothing."""
    style = (HERE / "static" / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    loader = FileSystemLoader(HERE / "templates")
    templates = Environment(loader=loader, autoescape=True, finalize=format_value, undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True  # a table without rows is empty
    templates.filters |= FILTERS | {"block": make_block, "svg": draw_as_svg}
    used: list[Any] = [choose_samples, list_changes, list_config_differences, list_costs, list_ends, list_gaps]
    used += [list_scores, list_set_keys, make_code, read_history, read_input_digests, read_run_plan, tabulate_starts]
    templates.globals |= {function.__name__: function for function in used}
    return templates.get_template("report.html").render(style=style, digest=digest, **values).lstrip().encode()


def list_gaps(query: Query, run: RunSummary) -> list[str]:
    """List what is missing or damaged."""
    folder, files = run.folder, ["config.yaml", "history.jsonl", "metrics.jsonl"]
    files = files[:2] if run.kind == "evaluation" else files
    gaps = [f"{file} is missing" for file in files if not (folder / file).is_file()]
    gaps += ["config.yaml is damaged"] * ((folder / "config.yaml").is_file() and not read_config(folder))
    for file, damaged, error in query.select("SELECT name, damaged, error FROM files WHERE run = ?", run.id):
        gaps += [f"{file} has {damaged} damaged lines"] * bool(damaged) + [f"{file}: {error}"] * bool(error)
    results = [result for result in read_suite_results(folder) if result.error]
    return gaps + [f"{result.suite}, {result.model} failed: {result.error}" for result in results]


def read_curves(database: sqlite3.Connection, groups: Groups, metric: str) -> dict[str, Curve]:
    """Read the curves of a metric of the groups that have it. Their intervals are over seeds for groups of several
    runs, otherwise over prompts."""
    curves = {name: read_group_curve(database, name, runs, metric, True) for name, runs in groups.items()}
    return {name: curve for name, curve in curves.items() if len(curve.steps)}


def list_ends(charts: Mapping[str, Mapping[str, Curve]]) -> Iterator[Row]:
    """Yield (metric, first value, its iteration, last value, its iteration) of each curve."""
    for metric, curves in charts.items():
        for name, curve in curves.items():
            of_name = f" of {' '.join(name.split())}" if len(curves) > 1 else ""
            row = [value for at in (0, -1) for value in (make_estimate(curve, at), int(curve.steps[at]))]
            yield make_code(metric) + of_name, *row


def list_config_differences(runs: Sequence[RunSummary], groups: Groups) -> Iterator[Row]:
    """Yield (key, values in each group) of the keys that differ between runs, without secrets."""
    different, _ = compare_configs([run.folder for run in runs])
    names = {run.id: run.name for run in runs}
    if any(name != names[run] for name, group in groups.items() for run in group):
        yield "runs", *(", ".join(names[run] for run in group) for group in groups.values())
    for key, values in different.items():
        of_run = {run.id: value or "-" for run, value in zip(runs, values, strict=True)}
        yield make_code(key), *(", ".join(dict.fromkeys(of_run[run] for run in group)) for group in groups.values())


def list_changes(query: Query, run: RunSummary) -> Iterator[Row]:
    """Yield (samples, figure, mean before, mean after, mean difference over the prompts that both have) of the first
    and the last validation, for each data source and, if there are several, for all."""
    for kind in ("val", "val_greedy"):
        if len(steps := list_steps(query.database, run.id, kind)) < 2:
            continue
        both = [tabulate(query.database, [run.id], kind, step) for step in (steps[0], steps[-1])]
        sources = sorted({source for table in both for source, _ in table.index})
        for source in [*sources, None] if len(sources) > 1 else sources:
            old, new = (table if source is None else table[table.index.get_level_values(0) == source] for table in both)
            label = f"{KIND_NAMES[kind]}, {'all' if source is None else source}"
            yield from ((label, *row) for row in compare_prompts(old, new))


def list_scores(run: RunSummary) -> Iterator[Row]:
    """Yield (data source, metric, mean, number of problems) of an evaluation, and of all evaluation suites."""
    with suppress(msgspec.ValidationError):
        saved = read_json_object(run.folder / "summary.json").get("by_data_source", {})
        for source, summary in msgspec.convert(saved, dict[str, Summary]).items():
            yield from ((source, name, mean, mean.problems) for name, mean in summary.figures.items())
    for result in read_suite_results(run.folder):
        source = f"{result.suite}, {result.model}"
        yield from ((source, f"{score.task} {score.metric}", score.value, score.rows) for score in result.scores)


def choose_samples(query: Query, run: RunSummary) -> list[list[JsonObject]]:
    """Choose up to NUM_SAMPLES prompts, evenly from the one that got worst to the one that improved most.

    Returns the first and the last answer to each; one answer, if no prompt was answered in two iterations.
    """
    answers = []
    for kind in ("val_greedy", "val", "step", "results"):
        pairs: dict[tuple[str, int], list[JsonObject]] = {}  # by content: a resumed run may have other rows
        rows = "SELECT * FROM trajectories WHERE run = ? AND kind = ? AND sample = 0 ORDER BY step, line"
        for row in map(dict, query.select(rows, run.id, kind)):
            first = pairs.setdefault((row["data_source"], row["question"]), [row])[0]
            pairs[row["data_source"], row["question"]] = [first, row] if row["step"] > first["step"] else [first]
        answers.append(list(pairs.values()))

    def rank(pair: Sequence[JsonObject]) -> tuple[float, float, str, int]:
        before, after = (answer["reward"] or 0.0 for answer in (pair[0], pair[-1]))
        return after - before, after, pair[0]["data_source"], pair[0]["prompt_id"]

    compared = [[pair for pair in of_kind if len(pair) == 2] for of_kind in answers]
    chosen = choose_evenly(sorted(next(filter(None, compared + answers), []), key=rank), NUM_SAMPLES)
    return [[read_answer(run.folder, answer) for answer in pair] for pair in chosen]


def read_answer(folder: Path, row: JsonObject) -> JsonObject:
    """Return a row of the table `trajectories` with `prompt`, `truth` and `text`."""
    record = read_record(folder, row)
    texts = {"prompt": get_last_message(record["prompt"]), "truth": record["ground_truth"], "text": record["text"]}
    return row | texts


def list_set_keys(run: RunSummary) -> Iterator[Row]:
    """Yield (key, value at each start) of the keys that were set or changed, and of the seeds."""
    for row in tabulate_starts(run.folder)[1]:
        if row.is_set or row.key.endswith("seed"):
            yield make_code(row.key), *map(make_code, row.values)


def list_costs(query: Query, run: RunSummary) -> Iterator[Row]:
    """Yield (label, cost)."""
    sums = dict(map(tuple, query.select("SELECT name, total(value) FROM metrics WHERE run = ? GROUP BY name", run.id)))
    yield "wall time of the commands", format_duration(run.seconds) if run.seconds else "not recorded"
    if run.seconds:
        hours = run.devices * run.seconds / 3600
        yield "GPU-hours", f"{hours:.2f} ({run.devices} GPUs)" if run.devices else "0 (CPU)"
    if phases := format_time_summary({name: value for name, value in sums.items() if name.startswith("timing/")}):
        yield "iterations", phases
    yield from ((label, f"{sums[name]:,.0f}") for name, label in SUMMED.items() if name in sums)


def format_value(value: object) -> str:
    """Format a value in one line: texts shortened, without control characters, bidirectional controls and lone
    surrogates."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Estimate):
        return f"{value.value:.4g}" + ("" if value.low is None else f" [{value.low:.3g}, {value.high:.3g}]")
    if value is None or isinstance(value, float):
        return "-" if value is None else f"{value:.4g}"
    return " ".join(shorten_text(str(value), MAX_CHARS).split())


def make_code(value: object) -> Markup:
    """Format a text as code in a line."""
    return Markup("<code>{}</code>").format(format_value(value) or "-")


def make_block(text: object, max_chars: int = MAX_CHARS) -> Markup:
    """Format a text as a block of code."""
    return Markup("<pre><code>{}\n</code></pre>").format(shorten_text(str(text), max_chars) or "(empty)")


def draw_as_svg(curves: Mapping[str, Curve], names: Sequence[str]) -> Markup:
    """Draw the curves of a metric as SVG, in base64. names: of all curves of the page, in the order of their colors."""
    import matplotlib as mpl
    from matplotlib.rcsetup import cycler

    thin = {name: thin_out(curve, MAX_POINTS) for name, curve in curves.items()}
    points = {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in thin.items()}
    bands = {name: curve.band.tolist() for name, curve in curves.items()}
    colors = [FILTERS["color"](names.index(name)) for name in curves]
    with mpl.rc_context({"svg.hashsalt": "report", "axes.prop_cycle": cycler(color=colors), "font.size": 9}):
        figure, content = plot_curves_as_figure(points, "", "iteration", bands), StringIO()
        figure.axes[0].legend().remove()  # the page has one for all plots
        figure.set_size_inches(4.6, 2.6)
        figure.savefig(content, format="svg", metadata={"Date": None})
    return Markup(base64.b64encode(content.getvalue().encode()).decode())
