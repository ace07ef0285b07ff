r"""Prepare preference pairs: a prompt with a chosen and a rejected answer.

    python -m examples.data_preprocess.prepare_preference --data_source gsm8k_model_solutions.jsonl

A row has `chosen` and `rejected` (texts, or chats with a common beginning), or a question and labelled solutions
`{solution, is_correct}` in columns of any name or in a list `solutions`. Each right solution is paired with a wrong
one, at most --max_pairs per problem. So are right and wrong answers in results.jsonl of main_generation. Writes
<local_dir>/<split>.parquet: `prompt`, `chosen` and `rejected` are chats.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import pyarrow as pa

from alphaapollo.data.files import DataRow
from alphaapollo.types import Message
from examples.data_preprocess.columns import (
    ANSWER_KEYS,
    Columns,
    Dropped,
    as_text,
    find_question,
    find_text,
    ground_truth_of,
    is_prose,
    is_unicode,
    labelled_solutions,
    value_at,
)
from examples.data_preprocess.common import (
    CHAT,
    Count,
    MakeRow,
    Script,
    finish,
    output_folder,
    run,
    source_name,
)
from examples.data_preprocess.prepare_right_answers import choose, is_results_file, read_answers
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


def pairs_of(row: DataRow, max_pairs: int, columns: Columns) -> list[Pair]:
    """Pairs of a row. Raises Dropped if there are none."""
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return [_given_pair(row, columns)]
    solutions: dict[str, bool] = {}
    for text, label in labelled_solutions(row):
        solutions.setdefault(CALCULATOR.sub("", text), label)
    if not solutions:
        raise Dropped("neither chosen and rejected, nor labelled solutions {solution, is_correct}")
    right, wrong = ([text for text, label in solutions.items() if label is wanted] for wanted in (True, False))
    if not right or not wrong:
        raise Dropped("no pair of a right and a wrong solution")
    _, question = find_question(row, columns)
    prompt = [Message(role="user", content=question)]
    return [(prompt, _said(good), _said(bad)) for good, bad in list(product(right, wrong))[:max_pairs]]


def _given_pair(row: DataRow, columns: Columns) -> Pair:
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        pair = _split_chats(read_messages(chosen, "chosen"), read_messages(rejected, "rejected"))
        prompt = pair[0] or [Message(role="user", content=find_question(row, columns)[1])]
        pair = prompt, pair[1], pair[2]
    else:
        texts = [find_text(row, [key], f"{key} answer")[1] for key in ("chosen", "rejected")]
        prompt = [Message(role="user", content=find_question(row, columns)[1])]
        pair = prompt, _said(texts[0]), _said(texts[1])
    if pair[1] == pair[2]:
        raise Dropped("chosen and rejected are the same")
    return pair


def _split_chats(chosen: list[Message], rejected: list[Message]) -> Pair:
    """(prompt, chosen, rejected). The prompt is the common beginning, up to the assistant turn that differs."""
    same = next((place for place, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        raise Dropped("chosen and rejected are the same")
    if chosen[same]["role"] != "assistant" or rejected[same]["role"] != "assistant":
        raise Dropped("chosen and rejected answer different questions")
    return chosen[:same], chosen[same:], rejected[same:]


def _said(text: str) -> list[Message]:
    return [Message(role="assistant", content=text)]


def ground_truth(row: DataRow, columns: Columns) -> str | None:
    """Final answer of the row, if it has one."""
    texts = [as_text(value_at(row, key)) for key in ([columns.answer] if columns.answer else ANSWER_KEYS)]
    answers = [ground_truth_of(text) for text in texts if text and is_unicode(text)]
    return next((answer for answer in answers if not is_prose(answer)), None)


def make_pairs(args: argparse.Namespace, data_source: str, split: str) -> MakeRow:
    def make(row: DataRow, index: int) -> list[DataRow]:
        facts = {"split": split, "index": index, "ground_truth": ground_truth(row, args.columns)}
        return [
            {"data_source": data_source, "prompt": prompt, "chosen": chosen, "rejected": rejected}
            | {"extra_info": {**facts, "pair": number}}
            for number, (prompt, chosen, rejected) in enumerate(pairs_of(row, args.max_pairs, args.columns))
        ]

    return make


SCRIPT = Script(
    __doc__,
    make_pairs,
    {"--max_pairs": {"type": int, "default": 4, "help": "maximum number of pairs per problem"}},
    ["train"],
    folder="preference/{}",
    schema=PREFERENCE_SCHEMA,
    describe=lambda pairs: f"{len(pairs)} pairs",
)


def prepare_results(source: str, folder: Path, max_pairs: int) -> None:
    """Write train.parquet: pairs of right and wrong answers of a generation run. Raises ValueError if there is none."""
    count, rows = Count(), list[DataRow]()
    for answers in read_answers([source], count).values():
        different = choose(answers, len(answers), shortest=False)
        right, wrong = ([one for one in different if (one.accuracy >= 1) is good] for good in (True, False))
        pairs = list(product(right, wrong))[:max_pairs]
        count.kept += len(pairs)
        count.dropped["no pair of a right and a wrong answer"] += 0 if pairs else len(answers)
        for place, (good, bad) in enumerate(pairs):
            prompt, chosen, rejected = _split_chats(good.messages, bad.messages)
            facts = {"split": "train", "index": len(rows), "pair": place, "ground_truth": good.ground_truth}
            rows.append({"data_source": good.data_source, "prompt": prompt, "chosen": chosen, "rejected": rejected})
            rows[-1]["extra_info"] = facts
    count.dropped = +count.dropped  # without zeros
    finish(rows, count, folder / "train.parquet", f"{len(rows)} pairs", PREFERENCE_SCHEMA)


def prepare(args: argparse.Namespace) -> None:
    """Write each split of the source. Raises ValueError if it cannot be read or has no usable row."""
    if args.max_pairs < 1:
        raise ValueError(f"--max_pairs {args.max_pairs}: must be at least 1.")
    if is_results_file(args.data_source):
        folder = output_folder(args.local_dir, f"preference/{source_name(args.data_source)}")
        prepare_results(args.data_source, folder, args.max_pairs)
    else:
        SCRIPT.write(args)


def main() -> None:
    args = SCRIPT.parse()
    run(lambda: prepare(args))


if __name__ == "__main__":
    main()
