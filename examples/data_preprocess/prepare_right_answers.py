r"""Rejection sampling: write the correct answers of a generation run as supervised data.

    python -m examples.data_preprocess.prepare_right_answers --results outputs/alphaapollo/round_1/results.jsonl \
        --max_answers 4 --shortest --local_dir outputs/data/round_1

--results: one or more results.jsonl files of main_generation. Answers are kept if their accuracy is at least
--min_accuracy and no limit cut them. Each text is kept once, and at most --max_answers per problem: the first ones, or
with --shortest the ones with the fewest tokens. Writes <local_dir>/train.parquet with `messages`, which main_sft reads.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaapollo.data.files import DataRow
from alphaapollo.observability.sample_metrics import read_sample_result
from alphaapollo.types import EpisodeEnd, Message
from examples.data_preprocess.columns import Dropped, is_unicode
from examples.data_preprocess.common import SFT_SCHEMA, Count, finish, output_folder, run


@dataclass(frozen=True)
class Answer:
    """A complete answer to one problem."""

    problem: str  # equal for samples of one problem
    data_source: str
    ground_truth: str | None
    messages: list[Message]
    num_tokens: int
    accuracy: float


def read_answer(record: Mapping[str, Any]) -> Answer:
    """Read a line of results.jsonl. Raises Dropped if it cannot be used for training."""
    try:
        result, asked, turns = read_sample_result(record), record["prompt"], record["turns"]
        several = len(record["rows"]) > 1
    except (ValueError, KeyError, TypeError) as error:
        raise Dropped("not a result of main_generation") from error
    if result.outcome.failed:
        raise Dropped("its grader or environment failed")
    if result.end is not EpisodeEnd.DONE:
        raise Dropped("truncated by a limit")
    if several:
        raise Dropped("a separate prompt per turn (env.context=memory), not a chat")
    if not isinstance(asked, list):
        raise Dropped("the prompt is plain text, not a chat")
    messages = [*asked, *_said(turns)]
    if not all(one["content"].strip() for one in messages if one["role"] == "assistant"):
        raise Dropped("an empty turn, which main_sft rejects")
    if not all(is_unicode(one["content"]) for one in messages):
        raise Dropped("a message is not valid Unicode")
    truth = record["ground_truth"]
    problem = json.dumps([result.data_source, asked, truth, record.get("prompt_digest")])
    shown = None if truth is None else str(truth)
    return Answer(problem, result.data_source, shown, messages, result.num_tokens or 0, result.accuracy)


def _said(turns: Iterable[Mapping[str, Any]]) -> Iterator[Message]:
    """Turns of the model with the environment's messages between them."""
    turns = list(turns)
    for number, turn in enumerate(turns, start=1):
        yield Message(role="assistant", content=turn["text"])
        if number < len(turns):
            yield from (Message(role=one["role"], content=one["content"]) for one in turn["observation"] or ())


def choose(answers: Sequence[Answer], max_answers: int, shortest: bool) -> list[Answer]:
    """Distinct answers to one problem: the first ones or the shortest."""
    different = list({json.dumps(one.messages): one for one in reversed(answers)}.values())[::-1]
    if shortest:
        different.sort(key=lambda one: one.num_tokens)
    return different[:max_answers]


def is_results_file(source: str) -> bool:
    """Whether a source is a results.jsonl of main_generation."""
    path = Path(source).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    return all(f'"{key}":' in first for key in ("prompt_id", "turns", "rows", "outcome"))


def read_answers(files: Sequence[str], count: Count) -> dict[str, list[Answer]]:
    """Read answers by problem, and count dropped ones by reason. Raises ValueError if a file cannot be read."""
    problems: dict[str, list[Answer]] = defaultdict(list)
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"--results {name}: no such file. Give results.jsonl of a run of main_generation.")
        with path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    answer = read_answer(json.loads(line))
                except json.JSONDecodeError:
                    count.dropped["an incomplete line"] += 1
                except Dropped as reason:
                    count.dropped[str(reason)] += 1
                else:
                    problems[answer.problem].append(answer)
    return problems


def prepare(files: Sequence[str], folder: Path, min_accuracy: float, max_answers: int, shortest: bool) -> None:
    """Write train.parquet. Raises ValueError if there is no input or no correct answer."""
    if max_answers < 1:
        raise ValueError(f"--max_answers {max_answers}: must be at least 1.")
    count, rows = Count(), list[DataRow]()
    problems = read_answers(files, count)
    for answers in problems.values():
        right = [one for one in answers if one.accuracy >= min_accuracy]
        count.dropped["wrong"] += len(answers) - len(right)
        answers = right
        kept = choose(answers, max_answers, shortest)
        count.kept += len(kept)
        different = len({json.dumps(one.messages) for one in answers})
        count.dropped["a duplicate"] += len(answers) - different
        count.dropped[f"more than {max_answers} per problem"] += different - len(kept)
        for one in kept:
            facts = {"split": "train", "index": len(rows), "ground_truth": one.ground_truth}
            rows.append({"data_source": one.data_source, "messages": one.messages, "extra_info": facts})
    count.dropped = +count.dropped  # without zeros
    finish(rows, count, folder / "train.parquet", f"right answers of {len(problems)} problems", SFT_SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", nargs="+", required=True, help="results.jsonl of main_generation")
    parser.add_argument("--min_accuracy", type=float, default=1.0, help="minimum accuracy of a correct answer")
    parser.add_argument("--max_answers", type=int, default=4, help="maximum number of answers per problem")
    parser.add_argument("--shortest", action="store_true", help="keep the shortest answers, not the first ones")
    parser.add_argument("--local_dir", help="where to write (default: outputs/data/right_answers)")
    args = parser.parse_args()
    folder = output_folder(args.local_dir, "right_answers")
    run(lambda: prepare(args.results, folder, args.min_accuracy, args.max_answers, args.shortest))


if __name__ == "__main__":
    main()
