"""Print evaluation summaries and write summary.json and summary.csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rich.table import Table

from alphaapollo.evaluation.metrics import Estimate, SampleResult, Summary, join_repeats, summarize
from alphaapollo.observability.disk import replace_file, writing
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import Prompt

FIELDS = ("data_source", "figure", "value", "low", "high", "problems")
TOKENS = ("response_length",)  # metrics in tokens

WIDE = 1000  # columns; prevents rich from truncating names in narrow terminals


def report(results: Sequence[SampleResult], prompts: Sequence[Prompt], folder: Path, terminal: Terminal) -> None:
    """Print and write the metrics. prompts: prompts of the results.

    Raises ValueError, after writing, if all samples failed.
    """
    summary = summarize(join_repeats(results, prompts))
    print_summary(*summary, terminal)
    files = write_summary(folder, *summary)
    terminal.write(f"written: {', '.join(map(str, files))}")
    failed = [result for result in results if result.outcome.failed]
    if failed:
        first = min(failed, key=lambda result: (result.problem, result.sample))
        reason = f"prompt {first.problem}, sample {first.sample}: {first.outcome}: {first.reason}"
        if len(failed) == len(results):
            raise ValueError(f"all {len(failed)} samples failed. The first: {reason}")
        terminal.note(f"{len(failed)} failed. The first: {reason}")


def print_summary(everything: Summary, sources: Mapping[str, Summary], terminal: Terminal) -> None:
    """Print a table with a block per data source and, if there are several, one for all."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("data source", "figure"):
        table.add_column(name, no_wrap=True)
    for name in ("value", "95 % interval", "problems"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in _blocks(everything, sources):
        title = summary.data_source or "(no data source)"
        for name, figure in summary.figures.items():
            shape = "{:.1f}" if name in TOKENS else "{:.4f}"
            table.add_row(title, name, shape.format(figure.value), _interval(figure, shape), str(figure.problems))
            title = ""
        if not summary.figures:
            table.add_row(title, "nothing scored")
        table.add_section()
    wide = Terminal(file=StringIO(), width=WIDE)
    with wide.capture() as text:
        wide.print(table)
    terminal.write("\n".join(line.rstrip() for line in text.get().splitlines()))
    for summary in _blocks(everything, sources):
        terminal.write(outcome_line(summary))


def outcome_line(summary: Summary) -> str:
    """`openai/gsm8k: 16 samples of 2 problems; 16 scored; ended: 15 done, 1 token limit`."""

    def listed(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()))

    left_out = f" ({summary.failed} failed, excluded from all metrics)" if summary.failed else ""
    ended = f"; ended: {listed(summary.ends)}" if summary.ends else ""
    head = f"{summary.data_source or '(no data source)'}: {summary.samples} samples of {summary.problems} problems"
    return f"{head}; {listed(summary.outcomes)}{left_out}{ended}"


def write_summary(folder: Path, everything: Summary, sources: Mapping[str, Summary]) -> list[Path]:
    """Write summary.json, and summary.csv with a row per data source and metric. Both are written atomically."""
    record = {"all": _record(everything), "by_data_source": {name: _record(own) for name, own in sources.items()}}
    table = StringIO(newline="")
    rows = csv.DictWriter(table, FIELDS)
    rows.writeheader()
    for summary in _blocks(everything, sources):
        for name, figure in summary.figures.items():
            rows.writerow({"data_source": summary.data_source, "figure": name} | asdict(figure))
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    files = {"summary.json": text + "\n", "summary.csv": table.getvalue()}
    with writing("the summary", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, [content.encode()])
    return [folder / name for name in files]


def _blocks(everything: Summary, sources: Mapping[str, Summary]) -> Sequence[Summary]:
    return [*sources.values(), everything] if len(sources) != 1 else [*sources.values()]


def _record(summary: Summary) -> dict[str, Any]:
    return asdict(summary) | {"failed": summary.failed}


def _interval(figure: Estimate, shape: str) -> str:
    if figure.low is None or figure.high is None:
        return "-"
    return f"{shape.format(figure.low)} to {shape.format(figure.high)}"
