"""Read what a report shows of a run: metrics, and samples with intervals over prompts.

Of many or large files with samples, a few are read, evenly spread over the iterations.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from alphaapollo.evaluation import metrics as evaluation
from alphaapollo.evaluation.metrics import SampleResult
from alphaapollo.observability.advice import MetricsAdvisor
from alphaapollo.observability.terminal import ELLIPSIS, get_last_message
from alphaapollo.rollout.suites import read_suite_results
from alphaapollo.types import JsonObject, Outcome, Prompt
from alphaapollo.viewer.index import KIND_NAMES, iterate_lines, list_indexed_files, parse_file_name, parse_metrics
from alphaapollo.viewer.run_folders import find_kind, read_config, read_json_object

MAX_FILES = 24  # files with samples that are read, per kind
MAX_BYTES = 2**29  # and their size
MAX_PROBLEMS = 2000  # of an evolution
KEPT_CHARS = 2000  # at the beginning and at the end of a text
FIGURES = ("accuracy", "reward", "response_length")
BANDS = {  # kind of samples -> the metric that is the mean of each of FIGURES over prompts
    "val": ("val/accuracy", "val/reward", "val/response_length"),
    "step": ("reward/accuracy", "critic/score/mean", "response_length/mean"),
}


@dataclass(frozen=True)
class Sample:
    """Answer to a prompt in an iteration, with its result."""

    step: int
    result: SampleResult
    question: str
    truth: str
    text: str


@dataclass
class RunContent:
    """What a report shows of a run. Kinds of samples: step (training), val, val_greedy, results, problems."""

    folder: Path
    name: str
    metrics: pd.DataFrame = field(default_factory=pd.DataFrame)  # by iteration (rows) and name (columns)
    bands: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    """Metric -> its 95 % intervals (iteration, low, high) at the iterations that have one."""
    results: dict[str, dict[int, list[SampleResult]]] = field(default_factory=lambda: defaultdict(dict))
    """Kind -> iteration -> results, of the first and of the last iteration."""
    answers: dict[str, dict[tuple[str, int], list[Sample]]] = field(default_factory=lambda: defaultdict(dict))
    """Kind -> (data source, prompt) -> its first answer and, if a later iteration has the prompt, its last answer."""
    failures: Counter[str] = field(default_factory=Counter)  # reason -> samples
    warnings: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)  # what is missing or damaged


def read_run(folder: Path, name: str) -> RunContent:
    """Read a run. What is missing or damaged is left out and listed in `gaps`."""
    run, rows, advisor, damaged = RunContent(folder, name), dict[int, dict[str, float]](), MetricsAdvisor(), 0
    expected = ["config.yaml", "history.jsonl"] + ["metrics.jsonl"] * (find_kind(folder) != "evaluation")
    run.gaps = [f"{file} is missing" for file in expected if not (folder / file).is_file()]
    if (folder / "config.yaml").is_file() and not read_config(folder):
        run.gaps.append("config.yaml is damaged")
    for line in _iterate_file(folder / "metrics.jsonl"):
        if parsed := parse_metrics(line):
            rows[parsed[0]] = parsed[1]
            run.warnings += advisor.list_warnings(*parsed)
        else:
            damaged += 1
    run.gaps += [f"metrics.jsonl has {damaged} damaged lines"] * bool(damaged)
    run.metrics = pd.DataFrame.from_dict(rows, orient="index").sort_index()
    for metric in {name.removesuffix("/low") for row in rows.values() for name in row if name.endswith("/low")}:
        bounds = run.metrics.reindex(columns=[f"{metric}/low", f"{metric}/high"])
        run.bands[metric] = list(bounds.dropna().itertuples(name=None))
    files_of_kind: defaultdict[str, list[tuple[int, Path, int]]] = defaultdict(list)
    for file, stat in list_indexed_files(folder):
        if file == "results.jsonl" or file.startswith("rollouts/"):
            kind, step = parse_file_name(file)
            files_of_kind[kind].append((step, folder / file, stat.st_size))
    for kind, of_kind in files_of_kind.items():
        largest = max(2, len(of_kind) * MAX_BYTES // max(sum(size for _, _, size in of_kind), 1))
        for step, path, _ in choose_evenly(sorted(of_kind), min(MAX_FILES, largest)):
            _read_samples(run, kind, step, path)
    for path in sorted(folder.glob("problems/*.json"))[:MAX_PROBLEMS]:
        _read_problem(run, read_json_object(path))
    run.gaps += [f"{one.suite}, {one.model} failed: {one.error}" for one in read_suite_results(folder) if one.error]
    run.gaps = list(dict.fromkeys(run.gaps))
    return run


def _iterate_file(path: Path) -> Iterator[bytes]:
    return (line for _, line in iterate_lines(path, 0)) if path.is_file() else iter(())


def _read_samples(run: RunContent, kind: str, step: int, path: Path) -> None:
    results, prompts, damaged = list[SampleResult](), dict[int, Prompt](), 0
    for line in _iterate_file(path):
        try:
            record = json.loads(line)
            record["components"] = {name: float(one) for name, one in record["components"].items() if one is not None}
            result = evaluation.read_sample_result(record)
            texts = str(get_last_message(record["prompt"])), str(record["ground_truth"]), str(record["text"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            damaged += 1
            continue
        results.append(result)
        source, number = result.data_source, result.problem_id
        prompts[number] = Prompt(number, source, record["prompt"], texts[1], {"index": 0})  # equal prompts are repeats
        if result.outcome.failed:
            reason = f"{KIND_NAMES.get(kind, kind)}, {result.outcome}: {result.failure_reason[:200]}"
            run.failures[reason] += 1
        if result.sample_index == 0:
            sample = Sample(step, result, *map(cut_middle, texts))
            first = run.answers[kind].setdefault((source, number), [sample])[0]
            run.answers[kind][source, number] = [first, sample] if step > first.step else [first]
    run.gaps += [f"{path.relative_to(run.folder)} has {damaged} damaged lines"] * bool(damaged)
    if results:
        merged = evaluation.merge_repeated_prompts(results, prompts.values())
        start = min(run.results[kind], default=step)
        run.results[kind] = {start: run.results[kind].get(start, merged), step: merged}
        means = evaluation.estimate_means(make_figure_table(merged).to_numpy())
        for metric, mean in zip(BANDS.get(kind, ()), means, strict=False):
            run.bands[metric] += [(step, mean.low, mean.high)] if mean and mean.low is not None else []


def _read_problem(run: RunContent, problem: JsonObject) -> None:
    """Add the first and the chosen solution of a problem of an evolution, unless its file is damaged."""
    try:
        key, pair = (str(problem["data_source"]), int(problem["problem"])), list[Sample]()
        solutions = {one["key"]: one for one in problem["candidates"] if not one["failure"]}
        for one in (next(iter(solutions.values())), solutions[problem["chosen"]]):
            reward = math.nan if one["right"] is None else float(one["right"])
            result = SampleResult(key[1], 0, key[0], Outcome.SCORED, reward, reward)
            texts = (get_last_message(problem["prompt"]), str(problem["ground_truth"]), one["solution"])
            pair.append(Sample(one["place"]["round"], result, *map(cut_middle, texts)))
        run.answers["problems"][key] = pair
    except (KeyError, TypeError, ValueError, StopIteration):
        run.gaps.append("files in problems/ are damaged or have no solution")


def cut_middle(text: str) -> str:
    """Return a text without its middle if it is longer than 2 * KEPT_CHARS."""
    return text if len(text) <= 2 * KEPT_CHARS else text[:KEPT_CHARS] + ELLIPSIS + text[-KEPT_CHARS:]


def choose_evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return up to `count` items at equal distances, including the first and the last."""
    return [items[at] for at in np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)]


def make_figure_table(results: Sequence[SampleResult]) -> pd.DataFrame:
    """Return the FIGURES (columns) of each problem (rows)."""
    largest = evaluation.count_max_samples_per_problem(results)
    names, values = evaluation.compute_metrics_per_problem(results, largest)
    table = pd.DataFrame(values, sorted({result.problem_id for result in results}), names)
    return table.rename(columns={f"avg@{largest}": "accuracy"})[list(FIGURES)]


def compare_results(before: Sequence[SampleResult], after: Sequence[SampleResult]) -> Iterator[tuple[object, ...]]:
    """Yield (data source, figure, mean before, mean after, mean difference over the problems that both have) for each
    data source and, if there are several, for all."""
    sources = sorted({result.data_source for result in [*before, *after]})
    for source in [*sources, None] if len(sources) > 1 else sources:
        parts = ([one for one in part if source in (None, one.data_source)] for part in (before, after))
        old, new = map(make_figure_table, parts)
        means = [evaluation.estimate_means(table.to_numpy()) for table in (old, new, new - old)]
        for figure, *of_figure in zip(FIGURES, *means, strict=True):
            yield "all" if source is None else source, figure, *of_figure
