"""Agreement of graders with labelled answers, computed in the same isolated processes as in a run.

    python -m alphaapollo.rewards.audit labelled.jsonl [--json] [--data_source math]

DATA is a jsonl or parquet file of rows `{data_source, response, ground_truth, is_correct}`. A false positive is a wrong
answer that is graded right, a false negative the reverse. A failure is an answer without a verdict (the grader raised,
hung or crashed), which agrees with no label. All of these are listed. With --json the last line is
`{"rows", "agreement", "false_positives", "false_negatives", "failures", "rows_per_s"}`, agreement from 0 to 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.observability.terminal import Terminal
from alphaapollo.rewards.answer_extraction import find_marked_answer
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import find_grader
from alphaapollo.types import Prompt, Score

COLUMNS = ("data_source", "response", "ground_truth", "is_correct")
MAX_CONCURRENT = 512  # answers sent to the graders at a time
MAX_SHOWN = 160  # characters of an answer in the list
MAX_PROBLEMS = 5  # malformed rows that are listed

console = Terminal(stderr=True)


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer with its label."""

    row: int  # in the file, from 0
    prompt: Prompt
    response: str
    is_correct: bool


@dataclass(frozen=True)
class GradedAnswer:
    """A labelled answer with its score."""

    answer: LabelledAnswer
    score: Score

    @property
    def kind(self) -> str:
        """`agreement`, `false positive`, `false negative` or `failure`."""
        if self.score.outcome.failed:
            return "failure"
        if (self.score.accuracy > 0.5) is self.answer.is_correct:
            return "agreement"
        return "false negative" if self.answer.is_correct else "false positive"

    def __str__(self) -> str:
        marked = find_marked_answer(self.answer.response)
        shown = _shorten(self.answer.response if marked is None else marked)
        reason = f": {self.score.reason}" if self.score.reason else ""
        truth = _shorten(self.answer.prompt.ground_truth or "")
        return f"row {self.answer.row}, {self.kind}{reason}\n  truth  {truth}\n  answer {shown}"


@dataclass(frozen=True)
class AuditSummary:
    """Counts of one audit."""

    rows: int
    agreement: float  # share of the rows, from 0 to 1
    false_positives: int
    false_negatives: int
    failures: int
    rows_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, agreement {self.agreement:.2%}, {self.false_positives} false positives, "
            f"{self.false_negatives} false negatives, {self.failures} failures, {self.rows_per_s:.0f} rows/s"
        )


def read_labelled(path: str, data_source: str = "") -> list[LabelledAnswer]:
    """Read labelled answers from a file; `data_source` replaces the column of that name.

    Raises:
        ValueError: the file cannot be read, has malformed rows (lists the first), or a data source has no grader.
    """
    rows = _read_rows(Path(path))
    if data_source:
        rows = [{**row, "data_source": data_source} if isinstance(row, dict) else row for row in rows]
    if problems := [f"row {index}: {problem}" for index, row in enumerate(rows) if (problem := find_problem(row))]:
        shown = "\n  ".join(problems[:MAX_PROBLEMS])
        raise ValueError(f"{path}: {len(problems)} of {len(rows)} rows are malformed (counted from 0):\n  {shown}")
    for source in sorted({row["data_source"] for row in rows}):
        find_grader(source)
    return [_to_answer(row, index) for index, row in enumerate(rows)]


def _read_rows(path: Path) -> list[Any]:
    try:
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
        else:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a readable jsonl or parquet file ({error}).") from error
    if not rows:
        raise ValueError(f"{path}: has no rows.")
    return rows


def find_problem(row: object) -> str:
    """Describe what is wrong with a row; empty if nothing is."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}; it must be an object with {', '.join(COLUMNS)}."
    if missing := [column for column in COLUMNS if row.get(column) is None]:
        return f"has no {', '.join(missing)}; it needs {', '.join(COLUMNS)}."
    if row["is_correct"] not in (0, 1):
        return f"is_correct is {row['is_correct']!r}; it must be true or false."
    not_text = (column for column in ("data_source", "response") if not isinstance(row[column], str))
    return next((f"{column} is a {type(row[column]).__name__}; it must be text." for column in not_text), "")


def _to_answer(row: dict[str, Any], index: int) -> LabelledAnswer:
    truth = row["ground_truth"]
    text = json.dumps(truth, ensure_ascii=False) if isinstance(truth, list | dict) else str(truth)
    prompt = Prompt(id=index, data_source=row["data_source"], content="", ground_truth=text)
    return LabelledAnswer(index, prompt, row["response"], bool(row["is_correct"]))


async def grade_answers(answers: Sequence[LabelledAnswer], reward: Reward) -> tuple[list[GradedAnswer], AuditSummary]:
    """Grade all answers in reward.num_workers processes, each within reward.timeout."""
    client, slots = RewardClient(reward, CustomRewardFunction()), asyncio.Semaphore(MAX_CONCURRENT)
    await client.start()
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("grading", total=len(answers))

            async def grade(answer: LabelledAnswer) -> GradedAnswer:
                async with slots:
                    score = await client.score(answer.prompt, answer.response)
                progress.advance(bar)
                return GradedAnswer(answer, score)

            start = time.perf_counter()
            graded = await asyncio.gather(*(grade(answer) for answer in answers))
            return graded, summarize(graded, time.perf_counter() - start)
    finally:
        await client.close()


def summarize(graded: Iterable[GradedAnswer], seconds: float) -> AuditSummary:
    """Count the kinds of graded answers that took `seconds` together."""
    kinds = [one.kind for one in graded]
    return AuditSummary(
        rows=len(kinds),
        agreement=kinds.count("agreement") / len(kinds),
        false_positives=kinds.count("false positive"),
        false_negatives=kinds.count("false negative"),
        failures=kinds.count("failure"),
        rows_per_s=round(len(kinds) / seconds, 1),
    )


def _shorten(text: str) -> str:
    """Return the end of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else "..." + line[-MAX_SHOWN:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="jsonl or parquet file of labelled answers")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON on the last line")
    parser.add_argument("--data_source", default="", help="grade all rows as rows of this data source")
    parser.add_argument("--workers", type=int, default=2, help="number of grader processes")
    parser.add_argument("--timeout", type=float, default=Reward().timeout, help="seconds for one answer")
    args = parser.parse_args()
    try:
        answers = read_labelled(args.data, args.data_source)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    graded, summary = asyncio.run(grade_answers(answers, Reward(num_workers=args.workers, timeout=args.timeout)))
    for one in graded:
        if one.kind != "agreement":
            print(str(one).encode("utf-8", "backslashreplace").decode())  # answers may contain lone surrogates
    print(summary)
    if args.json:
        print(json.dumps(vars(summary)))


if __name__ == "__main__":
    main()
