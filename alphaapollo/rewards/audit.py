"""How far a grader can be trusted: its verdicts on labelled answers, through the same isolation as in a run.

    python -m alphaapollo.rewards.audit labelled.jsonl [--json] [--data_source math]

DATA is a jsonl or parquet file of rows `{data_source, response, ground_truth, is_correct}`. A false positive is a
wrong answer that the grader calls right, a false negative the reverse; a failure is an answer without a verdict (the
grader raised, hung or crashed), which agrees with no label. All of these are listed. With --json the last line is
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

from alphaapollo.config.schema import Reward
from alphaapollo.observability.terminal import Terminal
from alphaapollo.rewards.answer_extraction import marked_answer
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import check_data_sources
from alphaapollo.types import Prompt, Score

COLUMNS = ("data_source", "response", "ground_truth", "is_correct")
IN_FLIGHT = 512  # answers given to the graders at a time
SHOWN = 160  # characters of an answer in the list
MAX_PROBLEMS = 5  # bad rows that are named

console = Terminal(stderr=True)


@dataclass(frozen=True)
class Labelled:
    """One answer, and whether it is right."""

    row: int  # in the file, from 0
    prompt: Prompt
    response: str
    is_correct: bool


@dataclass(frozen=True)
class Verdict:
    """What the grader said of it."""

    answer: Labelled
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
        marked = marked_answer(self.answer.response)
        said = _short(self.answer.response if marked is None else marked)
        why = f": {self.score.reason}" if self.score.reason else ""
        truth = _short(self.answer.prompt.ground_truth or "")
        return f"row {self.answer.row}, {self.kind}{why}\n  truth  {truth}\n  answer {said}"


@dataclass(frozen=True)
class Audit:
    """The counts of one audit."""

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


def read_labelled(path: str, data_source: str = "") -> list[Labelled]:
    """The labelled answers of a file; `data_source` replaces the column of that name.

    Raises:
        ValueError: the file cannot be read, has bad rows (names the first), or a data source has no grader.
    """
    rows = _read_rows(Path(path))
    answers, problems = [], []
    for index, row in enumerate(rows):
        try:
            answers.append(_to_labelled(row, index, data_source))
        except ValueError as error:
            problems.append(f"row {index}: {error}")
    if problems:
        shown = "\n  ".join(problems[:MAX_PROBLEMS])
        raise ValueError(f"{path}: {len(problems)} of {len(rows)} rows are bad (rows count from 0):\n  {shown}")
    check_data_sources(answer.prompt.data_source for answer in answers)
    return answers


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


def _to_labelled(row: Any, index: int, data_source: str) -> Labelled:
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}; it must be an object with {', '.join(COLUMNS)}.")
    row = {**row, "data_source": data_source or row.get("data_source")}
    if missing := [column for column in COLUMNS if row.get(column) is None]:
        raise ValueError(f"has no {', '.join(missing)}; needed are {', '.join(COLUMNS)}.")
    if row["is_correct"] not in (0, 1):
        raise ValueError(f"is_correct is {row['is_correct']!r}; it must be true or false.")
    for column in ("data_source", "response"):
        if not isinstance(row[column], str):
            raise ValueError(f"{column} is a {type(row[column]).__name__}; it must be text.")
    truth = row["ground_truth"]
    text = json.dumps(truth, ensure_ascii=False) if isinstance(truth, list | dict) else str(truth)
    prompt = Prompt(id=index, data_source=row["data_source"], content="", ground_truth=text)
    return Labelled(index, prompt, row["response"], bool(row["is_correct"]))


async def grade_all(answers: Sequence[Labelled], client: RewardClient) -> list[Verdict]:
    """A verdict for each answer, in their order."""
    free = asyncio.Semaphore(IN_FLIGHT)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("grading", total=len(answers))

        async def grade(answer: Labelled) -> Verdict:
            async with free:
                score = await client.score(answer.prompt, answer.response)
            progress.advance(bar)
            return Verdict(answer, score)

        return await asyncio.gather(*(grade(answer) for answer in answers))


def summarize(verdicts: Iterable[Verdict], seconds: float) -> Audit:
    """The counts of verdicts that took `seconds` together."""
    kinds = [verdict.kind for verdict in verdicts]
    return Audit(
        rows=len(kinds),
        agreement=kinds.count("agreement") / len(kinds),
        false_positives=kinds.count("false positive"),
        false_negatives=kinds.count("false negative"),
        failures=kinds.count("failure"),
        rows_per_s=round(len(kinds) / seconds, 1),
    )


async def audit(answers: Sequence[Labelled], num_workers: int, timeout: float) -> tuple[list[Verdict], Audit]:
    """Grade all answers in `num_workers` processes, each answer for at most `timeout` seconds."""
    client = RewardClient("", "", timeout, num_workers, {}, ())
    await client.start()
    try:
        start = time.perf_counter()
        verdicts = await grade_all(answers, client)
        return verdicts, summarize(verdicts, time.perf_counter() - start)
    finally:
        await client.close()


def _short(text: str) -> str:
    """The end of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else "..." + line[-SHOWN:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="jsonl or parquet file of labelled answers")
    parser.add_argument("--json", action="store_true", help="end with the counts as one line of JSON")
    parser.add_argument("--data_source", default="", help="grade all rows as of this data source")
    parser.add_argument("--workers", type=int, default=2, help="grader processes")
    parser.add_argument("--timeout", type=float, default=Reward().timeout, help="seconds for one answer")
    args = parser.parse_args()
    try:
        answers = read_labelled(args.data, args.data_source)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    verdicts, result = asyncio.run(audit(answers, args.workers, args.timeout))
    for verdict in verdicts:
        if verdict.kind != "agreement":
            print(str(verdict).encode("utf-8", "backslashreplace").decode())  # answers may hold half a surrogate pair
    print(result)
    if args.json:
        print(json.dumps(vars(result)))


if __name__ == "__main__":
    main()
