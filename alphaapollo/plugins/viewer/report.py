"""Reports of runs in one file: what was trained and how, results with intervals, samples, costs, and how to repeat it.

index of the runs -> rows of tables, curves and samples -> page (templates/report.html), in which no text of a model is
markup
"""

from __future__ import annotations

import base64
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import reduce
from io import StringIO
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from scipy.stats import ttest_ind

from alphaapollo.config.metrics import describe_axis, find_bounds, load_catalogue
from alphaapollo.observability.curve import Curve, plot_curves_as_figure
from alphaapollo.observability.metric_texts import format_duration, format_time_summary
from alphaapollo.observability.sample_metrics import Estimate, Summary
from alphaapollo.observability.terminal import get_last_message, shorten_text
from alphaapollo.plugins.viewer import run_folders
from alphaapollo.plugins.viewer.curves import (
    choose_curves,
    choose_evenly,
    compute_band,
    list_final_values,
    list_metrics,
    list_steps,
    make_estimate,
    read_curve,
    read_mean_curve,
    tabulate,
    thin_out,
)
from alphaapollo.plugins.viewer.experiments import compare_prompts, group_runs, list_paired_differences
from alphaapollo.plugins.viewer.formats import FILTERS
from alphaapollo.plugins.viewer.index import KIND_NAMES, RunIndex
from alphaapollo.plugins.viewer.run_folders import read_config, read_flat_config, read_json_object
from alphaapollo.plugins.viewer.samples import read_record
from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.runs.command_history import read_history
from alphaapollo.runs.run_plan import read_input_digests
from alphaapollo.types import JsonObject
from alphaapollo.utils.redaction import find_secret_keys_and_reasons

HERE = Path(__file__).parent
NUM_SAMPLES = 10
DIGEST_CHARS = 12
MAX_CHARS = 1500  # of a text in a line or of a sample
MAX_POINTS = 300  # of a curve
MAX_PROBLEMS = 2000  # of an evolution
Row = tuple[object, ...]
Groups = Mapping[str, Sequence["ReportedRun"]]


@dataclass(frozen=True)
class ReportedRun:
    """A run in the index. Kinds of samples: step (training), val, val_greedy, results."""

    database: sqlite3.Connection
    id: int
    folder: Path
    name: str

    def select(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query whose first parameter is the run."""
        return [tuple(row) for row in self.database.execute(query, (self.id, *values))]


def make_report(folders: Sequence[Path]) -> bytes:
    """Make the report of a run, or the comparison of several, as an HTML page. Raises ValueError for a folder that is
    no run."""
    folders = list(dict.fromkeys(folder.expanduser().absolute() for folder in folders))
    for folder in folders:
        check_format(folder)
        if not any((folder / name).is_file() for name in run_folders.MARKERS):
            markers = ", ".join(run_folders.MARKERS)
            below = ", ".join(map(str, run_folders.find_runs(folder))) or "none"
            raise ValueError(
                f"{folder} is no run: it has none of {markers}. Give the folder of a run; runs in it: {below}."
            )
    root = Path(os.path.commonpath(folders))
    with TemporaryDirectory() as temporary:
        index = RunIndex(root, Path(temporary, "index.sqlite"), folders)
        with closing(index.connect()) as database:
            index.update(database)
            ids = {row["path"]: row["id"] for row in database.execute("SELECT id, path FROM runs")}
            names = [run_folders.make_run_name(folder, root) for folder in folders]
            runs = [
                ReportedRun(database, ids[str(folder)], folder, name)
                for folder, name in zip(folders, names, strict=True)
            ]
            by_id = {run.id: run for run in runs}
            by_seed = group_runs({run.id: run.folder for run in runs}, root, by_seed=True)
            groups = {name: [by_id[run_id] for run_id in run_ids] for name, run_ids in by_seed.items()}
            title = f"Report of {runs[0].name}" if len(runs) == 1 else f"Comparison of {len(runs)} runs"
            metrics = {name for run in runs for name in list_metrics(database, run.id)}
            chosen, constants = choose_curves(database, list(by_id), metrics)
            values = {"title": title, "runs": runs, "groups": groups, "constants": constants}
            values["charts"] = {metric: read_curves(groups, metric) for metric in chosen}
            values["pairs"] = list(list_paired_differences(database, by_seed))
            return render_page(values | {"finals": list_final_values(database, by_seed, chosen)})


def render_page(values: Mapping[str, object]) -> bytes:
    """Render report.html. The page loads nothing and runs nothing."""
    style = (HERE / "static" / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    loader = FileSystemLoader(HERE / "templates")
    templates = Environment(loader=loader, autoescape=True, finalize=format_value, undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True  # a table without rows is empty
    templates.filters |= FILTERS | {"block": make_block, "svg": draw_as_svg}
    templates.globals |= globals()
    return templates.get_template("report.html").render(style=style, digest=digest, **values).lstrip().encode()


def list_gaps(run: ReportedRun) -> list[str]:
    """List what is missing or damaged."""
    folder, files = run.folder, ["config.yaml", "history.jsonl", "metrics.jsonl"]
    files = files[:2] if run_folders.find_kind(folder) == "evaluation" else files
    gaps = [f"{file} is missing" for file in files if not (folder / file).is_file()]
    gaps += ["config.yaml is damaged"] * ((folder / "config.yaml").is_file() and not read_config(folder))
    for file, damaged, error in run.select("SELECT name, damaged, error FROM files WHERE run = ? ORDER BY name"):
        gaps += [f"{file} has {damaged} damaged lines"] * bool(damaged) + [f"{file}: {error}"] * bool(error)
    return gaps + [
        f"{result.suite}, {result.model} failed: {result.error}"
        for result in read_suite_results(folder)
        if result.error
    ]


def read_curves(groups: Groups, metric: str) -> dict[str, Curve]:
    """Read the curves of a metric of the groups that have it. Their intervals are over seeds for groups of several
    runs, otherwise over prompts."""
    read = (
        read_mean_curve(runs[0].database, name, [run.id for run in runs], metric, compute_band)
        for name, runs in groups.items()
    )
    return {curve.name: curve for curve in read if len(curve.steps)}


def list_ends(charts: Mapping[str, Mapping[str, Curve]]) -> Iterator[Row]:
    """Yield (metric, first value, its iteration, last value, its iteration) of each curve."""
    for metric, curves in charts.items():
        for name, curve in curves.items():
            of_name = f" of {' '.join(name.split())}" if len(curves) > 1 else ""
            row = [value for at in (0, -1) for value in (make_estimate(curve, at), int(curve.steps[at]))]
            yield make_code(metric) + of_name, *row


def list_group_differences(groups: Groups, metrics: Iterable[str]) -> Iterator[Row]:
    """Yield (metric, group, other group, difference with Welch's interval, iteration) of groups of several runs, at the
    last iteration that all runs of both groups have."""
    for metric in metrics:
        for pair in combinations(groups, 2):
            read = ([read_curve(run.database, run.id, metric, "") for run in groups[name]] for name in pair)
            old, new = ([curve for curve in curves if len(curve.steps)] for curves in read)
            if min(len(old), len(new)) < 2:
                continue
            steps = reduce(np.intersect1d, [curve.steps for curve in (*old, *new)])
            for step in steps[-1:]:
                values, others = ([curve.values[curve.steps == step][0] for curve in curves] for curves in (new, old))
                low, high = None, None  # unless the runs of both groups differ by more than rounding
                if min(np.ptp(finals) - 1e-9 * np.abs(finals).max() for finals in (values, others)) > 0:
                    least, most = find_bounds(metric)
                    interval = ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
                    low, high = np.clip(interval, least - most, most - least)
                mean = Estimate(float(np.mean(values) - np.mean(others)), low, high, 0)
                yield make_code(metric), pair[1], pair[0], mean, int(step)


def list_config_differences(groups: Groups) -> Iterator[Row]:
    """Yield (key, values in each group) of the keys that differ between runs, without secrets."""
    configs = [[run_folders.read_settings(run.folder) for run in runs] for runs in groups.values()]
    keys = {key for group_configs in configs for config in group_configs for key in config}
    for runs in groups.values():
        keys -= {key for run in runs for key, _ in find_secret_keys_and_reasons(read_config(run.folder))}
    if any(name != run.name for name, runs in groups.items() for run in runs):
        yield "runs", *(", ".join(run.name for run in runs) for runs in groups.values())
    for key in sorted(keys):
        values = [dict.fromkeys(config.get(key, "-") for config in group_configs) for group_configs in configs]
        if len({value for group_values in values for value in group_values}) > 1:
            yield make_code(key), *map(", ".join, values)


def list_changes(run: ReportedRun) -> Iterator[Row]:
    """Yield (samples, figure, mean before, mean after, mean difference over the prompts that both have) of the first
    and the last validation, for each data source and, if there are several, for all."""
    for kind in ("val", "val_greedy"):
        if len(steps := list_steps(run.database, run.id, kind)) < 2:
            continue
        both = [tabulate(run.database, [run.id], kind, step) for step in (steps[0], steps[-1])]
        sources = sorted({source for table in both for source, _ in table.index})
        for source in [*sources, None] if len(sources) > 1 else sources:
            old, new = (table if source is None else table[table.index.get_level_values(0) == source] for table in both)
            label = f"{KIND_NAMES[kind]}, {'all' if source is None else source}"
            yield from ((label, *row) for row in compare_prompts(old, new))


def list_scores(run: ReportedRun) -> Iterator[Row]:
    """Yield (data source, metric, mean, number of problems) of an evaluation, and of all evaluation suites."""
    with suppress(msgspec.ValidationError):
        saved = read_json_object(run.folder / "summary.json").get("by_data_source", {})
        for source, summary in msgspec.convert(saved, dict[str, Summary]).items():
            yield from ((source, name, mean, mean.problems) for name, mean in summary.figures.items())
    for result in read_suite_results(run.folder):
        source = f"{result.suite}, {result.model}"
        yield from ((source, f"{score.task} {score.metric}", score.value, score.rows) for score in result.scores)


def choose_samples(run: ReportedRun) -> list[list[JsonObject]]:
    """Choose up to NUM_SAMPLES prompts, evenly from the one that got worst to the one that improved most.

    Returns the first and the last answer to each; one answer, if no prompt was answered in two iterations.
    """
    answers = [list(read_solutions(run.folder))]
    for kind in ("val_greedy", "val", "step", "results"):
        pairs: dict[tuple[str, int], list[JsonObject]] = {}  # by content: a resumed run may have other rows
        query = "SELECT * FROM trajectories WHERE run = ? AND kind = ? AND sample = 0 ORDER BY step, line"
        for row in map(dict, run.database.execute(query, (run.id, kind))):
            first = pairs.setdefault((row["data_source"], row["question"]), [row])[0]
            pairs[row["data_source"], row["question"]] = [first, row] if row["step"] > first["step"] else [first]
        answers.append(list(pairs.values()))

    def rank(pair: Sequence[JsonObject]) -> tuple[float, float, str, int]:
        before, after = (answer["reward"] or 0.0 for answer in (pair[0], pair[-1]))
        return after - before, after, pair[0]["data_source"], pair[0]["prompt_id"]

    compared = [[pair for pair in of_kind if len(pair) == 2] for of_kind in answers]
    chosen = choose_evenly(sorted(next(filter(None, compared + answers), []), key=rank), NUM_SAMPLES)
    return [[read_answer(run.folder, answer) for answer in pair] for pair in chosen]


def read_solutions(folder: Path) -> Iterator[list[JsonObject]]:
    """Yield the first and the chosen solution of each problem of an evolution, as `read_answer` returns them."""
    for path in sorted(folder.glob("problems/*.json"))[:MAX_PROBLEMS]:
        with suppress(KeyError, TypeError, ValueError, StopIteration):  # damaged, or without a solution
            problem = read_json_object(path)
            solutions = {candidate["key"]: candidate for candidate in problem["candidates"] if not candidate["failure"]}
            pair = next(iter(solutions.values())), solutions[problem["chosen"]]
            shared = {"prompt_id": int(problem["problem"]), "data_source": str(problem["data_source"]), "failure": ""}
            shared |= {"prompt": get_last_message(problem["prompt"]), "truth": problem["ground_truth"]}
            rewards = [None if candidate["right"] is None else float(candidate["right"]) for candidate in pair]
            answers = [
                {"step": candidate["key"].split(".")[1][1:], "text": candidate["solution"]} for candidate in pair
            ]
            yield [shared | answer | {"reward": reward} for answer, reward in zip(answers, rewards, strict=True)]


def read_answer(folder: Path, row: Any) -> JsonObject:
    """Return a row of the table `trajectories` with `prompt`, `truth` and `text`, unless it has them."""
    if "text" in row:
        return dict(row)
    record = read_record(folder, row)
    texts = {"prompt": get_last_message(record["prompt"]), "truth": record["ground_truth"], "text": record["text"]}
    return {**row, **texts}


def list_failures(run: ReportedRun) -> Iterator[Row]:
    """Yield (kind and reason, number) of the ten most frequent reasons of failed samples."""
    columns = "kind, outcome, failure, count(*)"
    failed = f"SELECT {columns} FROM trajectories WHERE run = ? AND reward IS NULL GROUP BY 1, 2, 3 ORDER BY 4 DESC"
    for kind, outcome, reason, count in run.select(f"{failed} LIMIT 10"):
        yield f"{KIND_NAMES.get(kind, kind)}, {outcome}: {reason}", count


def list_keys(run: ReportedRun) -> Iterator[Row]:
    """Yield (key, value) of the keys that are not the defaults, and of the seeds."""
    seeds = {key: value for key, value in read_flat_config(run.folder).items() if key.endswith("seed")}
    rows = run_folders.read_set_keys(run.folder) | seeds
    yield from ((make_code(key), make_code(value)) for key, value in rows.items())


def list_start_changes(run: ReportedRun) -> Iterator[Row]:
    """Yield (key, file of the start, value before, value) of keys that a later start has changed, without secrets."""
    starts = run_folders.list_config_starts(run.folder)
    hidden = {key for _, values in starts for key, _ in find_secret_keys_and_reasons(values)}
    for (_, old), (name, new) in pairwise(starts):
        for key in sorted((old.keys() | new.keys()) - hidden):
            if old.get(key) != new.get(key):
                yield make_code(key), name, make_code(old.get(key)), make_code(new.get(key))


def list_costs(run: ReportedRun) -> Iterator[Row]:
    """Yield (label, cost)."""
    history = read_history(run.folder)
    sums = dict(run.select("SELECT name, total(value) FROM metrics WHERE run = ? GROUP BY name"))
    seconds, gpus = run_folders.measure_costs(run.folder)
    yield "wall time of the commands that have ended", format_duration(seconds) if history else "not recorded"
    if history:
        yield "GPU-hours", f"{gpus * seconds / 3600:.2f} ({gpus} GPUs)" if gpus else "0 (CPU)"
    if phases := format_time_summary({name: total for name, total in sums.items() if name.startswith("timing/")}):
        yield "iterations", phases
    yield from ((label, f"{sums[name]:,.0f}") for name, label in load_catalogue().costs.items() if name in sums)
    if "train/tokens" in sums:
        query = "SELECT avg(value) * max(step) FROM metrics WHERE run = ? AND name = 'train/tokens'"
        yield "trained tokens, about", f"{run.select(query)[0][0]:,.0f}"


def list_checks(run: ReportedRun) -> Iterator[Row]:
    """Yield (quantity, deviation, tolerance, verdict, where and reason) of the verified update."""
    for *facts, where, reason in run_folders.list_checks(run.folder):
        yield *facts, f"{where} ({reason})" if where else reason


def list_digests(run: ReportedRun) -> Iterator[Row]:
    """Yield (key, file, digest) of the inputs, as recorded at the newest start of the run."""
    for key, pairs in read_input_digests(run.folder).items():
        yield from ((key, path, make_code(digest[:DIGEST_CHARS])) for path, digest in pairs)


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


def draw_as_svg(curves: Mapping[str, Curve], metric: str, names: Sequence[str]) -> Markup:
    """Draw the curves of a metric as SVG, in base64. names: of all curves of the page, in the order of their colors."""
    import matplotlib as mpl

    thin = {name: thin_out(curve, MAX_POINTS) for name, curve in curves.items()}
    numbers, axis, content = [names.index(name) for name in curves], describe_axis([metric]), StringIO()
    with mpl.rc_context({"svg.hashsalt": "report", "font.size": 9}):
        figure = plot_curves_as_figure(thin, x_label="iteration", y_label=axis, numbers=numbers)
        figure.axes[0].legend().remove()  # the page has one for all plots
        figure.set_size_inches(4.6, 2.6)
        figure.savefig(content, format="svg", metadata={"Date": None})
    return Markup(base64.b64encode(content.getvalue().encode()).decode())
