"""Print the metrics of evaluated samples, and write summary.json and summary.csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from alphaapollo.observability.sample_metrics import SampleResult, Summary, merge_repeated_prompts, summarize
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import Prompt
from alphaapollo.utils.disk import explain_write_errors, replace_file

CSV_COLUMNS = ("data_source", "figure", "value", "low", "high", "problems")
TOKEN_METRICS = ("response_length",)  # metrics in tokens


def write_report(results: Sequence[SampleResult], prompts: Sequence[Prompt], folder: Path, terminal: Terminal) -> None:
    """Print the metrics, and write them to summary.json and summary.csv. Raises ValueError if all samples failed."""
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
    rows = [("data source", "figure", "value", "95 % interval", "problems")]
    for summary in _list_summaries(overall, sources):
        title = summary.data_source or "(no data source)"
        for name, estimate in summary.figures.items():
            number = "{:.1f}" if name in TOKEN_METRICS else "{:.4f}"
            bounds = [number.format(bound) for bound in (estimate.low, estimate.high) if bound is not None]
            value, problems = number.format(estimate.value), str(estimate.problems)
            rows.append((title, name, value, " to ".join(bounds) or "-", problems))
            title = ""  # only the first row of a block has it
        if not summary.figures:
            rows.append((title, "nothing scored", "", "", ""))
    width_1, width_2 = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = (f"{a:<{width_1}}  {b:<{width_2}}  {c:>9}  {d:>20}  {e:>8}".rstrip() for a, b, c, d, e in rows)
    terminal.write("\n".join(lines))
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
    records = {name: asdict(summary) | {"failed": summary.num_failed} for name, summary in sources.items()}
    record = {"all": asdict(overall) | {"failed": overall.num_failed}, "by_data_source": records}
    table = StringIO(newline="")
    writer = csv.DictWriter(table, CSV_COLUMNS)
    writer.writeheader()
    for summary in _list_summaries(overall, sources):
        for name, estimate in summary.figures.items():
            writer.writerow({"data_source": summary.data_source, "figure": name} | asdict(estimate))
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    files = {"summary.json": text + "\n", "summary.csv": table.getvalue()}
    with explain_write_errors("the summary", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, [content.encode()])
    return [folder / name for name in files]


def _list_summaries(overall: Summary, sources: Mapping[str, Summary]) -> Sequence[Summary]:
    return [*sources.values(), overall] if len(sources) != 1 else [*sources.values()]
