"""Measure how often graders agree with labelled answers, in the same isolated processes as in a run.

    python -m scripts.grader_audit DATA [--json] [--data_source math]

DATA is a jsonl or parquet file of rows `{data_source, response, ground_truth, is_correct}`. A false positive is a wrong
answer that is graded as right. A false negative is a right answer that is graded as wrong. A failure is an answer
without a verdict, because the grader raised, hung or crashed. All three kinds are listed. With --json the last line is
`{"rows", "agreement", "false_positives", "false_negatives", "failures", "rows_per_s"}`; agreement is from 0 to 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError
from rich.progress import Progress

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.observability.terminal import Terminal
from alphaapollo.rewards.answer_extraction import find_marked_answer
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import get_grader
from alphaapollo.types import Prompt, Score

MAX_SHOWN = 160  # printed characters of an answer
AGREEMENT, FALSE_POSITIVE, FALSE_NEGATIVE, FAILURE = "agreement", "false positive", "false negative", "failure"

console = Terminal(stderr=True)


def _convert_ground_truth_to_text(truth: Any) -> Any:
    if isinstance(truth, list | dict):
        return json.dumps(truth, ensure_ascii=False)
    return None if truth is None else str(truth)


class LabelledAnswer(BaseModel):
    """Answer of a model with its ground truth and a label: whether a person judged the answer to be correct."""

    data_source: str
    response: str
    ground_truth: Annotated[str, BeforeValidator(_convert_ground_truth_to_text)]
    is_correct: bool


def read_labelled_answers(path: str, data_source: str = "") -> list[LabelledAnswer]:
    """Read labelled answers from a jsonl or parquet file. A non-empty `data_source` replaces that of every row. Raises
    ValueError if the file cannot be read, a row is malformed, or a data source has no grader."""
    try:
        if path.endswith(".parquet"):
            rows = pq.read_table(path).to_pylist()
        else:
            rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a readable jsonl or parquet file ({error}).") from error
    if not rows:
        raise ValueError(f"{path} has no rows.")
    if data_source:
        rows = [{**row, "data_source": data_source} if isinstance(row, dict) else row for row in rows]
    try:
        answers = TypeAdapter(list[LabelledAnswer]).validate_python(rows)
    except ValidationError as error:
        errors = error.errors()
        row, *column = errors[0]["loc"]
        location = ", ".join([f"row {row}", *map(str, column)])
        raise ValueError(f"{path}: {len(errors)} invalid values, first in {location}: {errors[0]['msg']}.") from error
    for source in sorted({answer.data_source for answer in answers}):
        get_grader(source)
    return answers


async def grade_and_time(answers: Sequence[LabelledAnswer], reward: Reward) -> tuple[list[Score], float]:
    """Grade answers in reward.num_workers processes. Returns the scores, and the seconds for all answers together."""
    client = RewardClient(reward, CustomRewardFunction())
    await client.start()
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("grading", total=len(answers))

            async def grade(index: int, answer: LabelledAnswer) -> Score:
                prompt = Prompt(index, answer.data_source, "", ground_truth=answer.ground_truth)
                score = await client.score(prompt, answer.response)
                progress.advance(bar)
                return score

            start = time.perf_counter()
            scores = await asyncio.gather(*(grade(index, answer) for index, answer in enumerate(answers)))
            return scores, time.perf_counter() - start
    finally:
        await client.close()


def compare_score_with_label(is_correct: bool, score: Score) -> str:
    """Compare the score of an answer with its label. Returns AGREEMENT, FALSE_POSITIVE, FALSE_NEGATIVE or FAILURE."""
    if score.outcome.failed:
        return FAILURE
    if (score.accuracy > 0.5) is is_correct:
        return AGREEMENT
    return FALSE_NEGATIVE if is_correct else FALSE_POSITIVE


def _keep_last_characters(text: str) -> str:
    """Join the lines of a text into one, and return its last MAX_SHOWN characters."""
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
        answers = read_labelled_answers(args.data, args.data_source)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    kinds = Counter[str]()
    scores, seconds = asyncio.run(grade_and_time(answers, Reward(num_workers=args.workers, timeout=args.timeout)))
    speed = round(len(answers) / seconds, 1)
    for row, (answer, score) in enumerate(zip(answers, scores, strict=True)):
        kind = compare_score_with_label(answer.is_correct, score)
        kinds[kind] += 1
        if kind != AGREEMENT:
            marked = find_marked_answer(answer.response)
            shown = _keep_last_characters(answer.response if marked is None else marked)
            reason = f": {score.reason}" if score.reason else ""
            line = f"row {row}, {kind}{reason}\n  truth  {_keep_last_characters(answer.ground_truth)}\n  answer {shown}"
            print(line.encode("utf-8", "backslashreplace").decode())  # answers may contain lone surrogates
    counts = {
        "rows": len(answers),
        "agreement": kinds[AGREEMENT] / len(answers),
        "false_positives": kinds[FALSE_POSITIVE],
        "false_negatives": kinds[FALSE_NEGATIVE],
        "failures": kinds[FAILURE],
        "rows_per_s": speed,
    }
    print(
        f"{len(answers)} rows, agreement {counts['agreement']:.2%}, {kinds[FALSE_POSITIVE]} false positives, "
        f"{kinds[FALSE_NEGATIVE]} false negatives, {kinds[FAILURE]} failures, {speed:.0f} rows/s"
    )
    if args.json:
        print(json.dumps(counts))


if __name__ == "__main__":
    main()
