r"""Preference pairs: a prompt with a chosen and a rejected answer.

    python -m examples.data_preprocess.prepare_preference --data_source gsm8k_model_solutions.jsonl

Rows are read that have `chosen` and `rejected` (texts, or chats that begin alike), or a question and labelled solutions
`{solution, is_correct}` in columns of any name, or in a list `solutions`: each right one is paired with a wrong one, at
most --max_pairs a problem. Writes <local_dir>/<split>.parquet: `prompt`, `chosen` and `rejected` are chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphaapollo.data.files import DataRow
from alphaapollo.types import Message
from examples.data_preprocess.common import (
    ANSWER_KEYS,
    CHAT,
    QUESTION_KEYS,
    Dropped,
    as_text,
    convert,
    data_source_of,
    find_text,
    finish,
    ground_truth_of,
    is_unicode,
    output_folder,
    read_splits,
    run,
    source_name,
    source_parser,
)
from examples.data_preprocess.prepare_sft import read_messages
from examples.data_preprocess.protocol import CALCULATOR

PREFERENCE_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": CHAT,
        "chosen": CHAT,
        "rejected": CHAT,
        "extra_info": pa.struct(
            {"split": pa.string(), "index": pa.int64(), "pair": pa.int64(), "ground_truth": pa.string()}
        ),
    }
)

Pair = tuple[list[Message], list[Message], list[Message]]  # prompt, chosen, rejected


def pairs_of(row: DataRow, max_pairs: int) -> list[Pair]:
    """The pairs that a row gives (Dropped: none)."""
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return [_given_pair(row)]
    solutions = labelled_solutions(row)
    right, wrong = ([text for text, label in solutions if label is wanted] for wanted in (True, False))
    if not right or not wrong:
        raise Dropped("no pair of a right and a wrong solution")
    _, question = find_text(row, QUESTION_KEYS, "question")
    prompt = [Message(role="user", content=question)]
    return [(prompt, _said(good), _said(bad)) for good, bad in list(product(right, wrong))[:max_pairs]]


def labelled_solutions(row: DataRow) -> list[tuple[str, bool]]:
    """Each different text `{solution, is_correct}` among the columns, or in a list `solutions` (Dropped: none)."""
    listed = row.get("solutions")
    values = listed if isinstance(listed, list) else list(row.values())
    found: dict[str, bool] = {}
    for value in values:
        if isinstance(value, dict) and {"solution", "is_correct"} <= value.keys():
            text = CALCULATOR.sub("", as_text(value["solution"]) or "")
            if text and is_unicode(text) and value["is_correct"] in (0, 1):
                found.setdefault(text, bool(value["is_correct"]))
    if not found:
        raise Dropped("neither chosen and rejected, nor labelled solutions {solution, is_correct}")
    return list(found.items())


def _given_pair(row: DataRow) -> Pair:
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        pair = _split_chats(read_messages(chosen, "chosen"), read_messages(rejected, "rejected"))
        prompt = pair[0] or [Message(role="user", content=find_text(row, QUESTION_KEYS, "question")[1])]
        pair = prompt, pair[1], pair[2]
    else:
        texts = [find_text(row, [key], f"{key} answer")[1] for key in ("chosen", "rejected")]
        prompt = [Message(role="user", content=find_text(row, QUESTION_KEYS, "question")[1])]
        pair = prompt, _said(texts[0]), _said(texts[1])
    if pair[1] == pair[2]:
        raise Dropped("chosen and rejected are the same")
    return pair


def _split_chats(chosen: list[Message], rejected: list[Message]) -> Pair:
    """What both chats begin with is the prompt; it ends before the assistant's turn in which they differ."""
    same = next((place for place, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        raise Dropped("chosen and rejected are the same")
    if chosen[same]["role"] != "assistant" or rejected[same]["role"] != "assistant":
        raise Dropped("chosen and rejected answer different questions")
    return chosen[:same], chosen[same:], rejected[same:]


def _said(text: str) -> list[Message]:
    return [Message(role="assistant", content=text)]


def ground_truth(row: DataRow) -> str | None:
    """The answer that the row names, if it does."""
    answers: list[Any] = [as_text(row.get(key)) for key in ANSWER_KEYS]
    return next((ground_truth_of(answer) for answer in answers if answer and is_unicode(answer)), None)


def prepare(source: str, folder: Path, splits: Sequence[str], config_name: str | None, max_pairs: int) -> None:
    """Write each split that the source has (ValueError: it cannot be read, or has no usable row)."""
    if max_pairs < 1:
        raise ValueError(f"--max_pairs {max_pairs}: must be at least 1.")
    data_source = data_source_of(source, fallback="math")
    for split, rows in read_splits(source, splits, config_name).items():

        def make(row: DataRow, index: int, split: str = split) -> DataRow:
            facts = {"split": split, "index": index, "ground_truth": ground_truth(row)}
            return {
                "pairs": [
                    {"data_source": data_source, "prompt": prompt, "chosen": chosen, "rejected": rejected}
                    | {"extra_info": {**facts, "pair": place}}
                    for place, (prompt, chosen, rejected) in enumerate(pairs_of(row, max_pairs))
                ]
            }

        made, count = convert(rows, make, split)
        pairs = [pair for row in made for pair in row["pairs"]]
        finish(pairs, count, folder / f"{split}.parquet", f"{len(pairs)} pairs", PREFERENCE_SCHEMA)


def main() -> None:
    parser = source_parser(__doc__, ["train"])
    parser.add_argument("--max_pairs", type=int, default=4, help="pairs of one problem at most")
    args = parser.parse_args()
    folder = output_folder(args.local_dir, f"preference/{source_name(args.data_source)}")
    run(lambda: prepare(args.data_source, folder, args.splits, args.config_name, args.max_pairs))


if __name__ == "__main__":
    main()
