"""Print evaluation summaries and write summary.json and summary.csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from rich.table import Table

from alphaapollo.evaluation.metrics import SampleResult, Summary, merge_repeated_prompts, summarize
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import JsonObject, Prompt
from alphaapollo.utils.disk import explain_write_errors, replace_file

FIELDS = ("data_source", "figure", "value", "low", "high", "problems")
TOKENS = ("response_length",)  # metrics in tokens

WIDE = 1000  # columns; prevents rich from truncating names in narrow terminals


def write_report(results: Sequence[SampleResult], prompts: Sequence[Prompt], folder: Path, terminal: Terminal) -> None:
    """Print the metrics of `results`, and write them to summary.json and summary.csv in `folder`.

    prompts: the prompts of all results. Raises ValueError, after writing, if all samples failed.
    """
    summary = summarize(merge_repeated_prompts(results, prompts))
    print_summary(*summary, terminal)
    files = write_summary(folder, *summary)
    terminal.write(f"written: {', '.join(map(str, files))}")
    failed = [result for result in results if result.outcome.failed]
    if failed:
        first = min(failed, key=lambda result: (result.problem_id, result.sample_index))
        reason = f"prompt {first.problem_id}, sample {first.sample_index}: {first.outcome}: {first.failure_reason}"
        if len(failed) == len(results):
            raise ValueError(f"All {len(failed)} samples failed. First failure: {reason}")
        terminal.write(f"note: {len(failed)} samples failed. First failure: {reason}")


def print_summary(overall: Summary, sources: Mapping[str, Summary], terminal: Terminal) -> None:
    """Print a table with a block per data source and, if there are several data sources, a block for all."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("data source", "figure"):
        table.add_column(name, no_wrap=True)
    for name in ("value", "95 % interval", "problems"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in _list_summaries(overall, sources):
        title = summary.data_source or "(no data source)"
        for name, estimate in summary.figures.items():
            number = "{:.1f}" if name in TOKENS else "{:.4f}"
            interval = "-"
            if estimate.low is not None and estimate.high is not None:
                interval = f"{number.format(estimate.low)} to {number.format(estimate.high)}"
            table.add_row(title, name, number.format(estimate.value), interval, str(estimate.problems))
            title = ""
        if not summary.figures:
            table.add_row(title, "nothing scored")
        table.add_section()
    wide = Terminal(file=StringIO(), width=WIDE)
    with wide.capture() as text:
        wide.print(table)
    terminal.write("\n".join(line.rstrip() for line in text.get().splitlines()))
    for summary in _list_summaries(overall, sources):
        terminal.write(format_outcome_line(summary))


def format_outcome_line(summary: Summary) -> str:
    """Format the counts, e.g. `openai/gsm8k: 16 samples of 2 problems; 16 scored; ended: 15 done, 1 token limit`."""

    def format_counts(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()))

    excluded = f" ({summary.num_failed} failed, excluded from all metrics)" if summary.num_failed else ""
    ended = f"; ended: {format_counts(summary.ends)}" if summary.ends else ""
    head = f"{summary.data_source or '(no data source)'}: {summary.samples} samples of {summary.problems} problems"
    return f"{head}; {format_counts(summary.outcomes)}{excluded}{ended}"


def write_summary(folder: Path, overall: Summary, sources: Mapping[str, Summary]) -> list[Path]:
    """Write summary.json, and summary.csv with a row per data source and metric. Both are written atomically."""

    def to_dict(summary: Summary) -> JsonObject:
        return asdict(summary) | {"failed": summary.num_failed}

    record = {"all": to_dict(overall), "by_data_source": {name: to_dict(one) for name, one in sources.items()}}
    table = StringIO(newline="")
    rows = csv.DictWriter(table, FIELDS)
    rows.writeheader()
    for summary in _list_summaries(overall, sources):
        for name, estimate in summary.figures.items():
            rows.writerow({"data_source": summary.data_source, "figure": name} | asdict(estimate))
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    files = {"summary.json": text + "\n", "summary.csv": table.getvalue()}
    with explain_write_errors("the summary", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, [content.encode()])
    return [folder / name for name in files]


def _list_summaries(overall: Summary, sources: Mapping[str, Summary]) -> Sequence[Summary]:
    """Return the summary of each data source and, unless there is only one, of all together."""
    return [*sources.values(), overall] if len(sources) != 1 else [*sources.values()]
