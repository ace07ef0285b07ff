r"""Prepare supervised data: chats in a `messages` column. The assistant's turns are trained on.

    python -m examples.data_preprocess.prepare_sft --data_source gsm8k_train.jsonl                    one turn each
    python -m examples.data_preprocess.prepare_sft --data_source gsm8k_train.jsonl --protocol tools   with tool turns
    python -m examples.data_preprocess.prepare_sft --data_source gsm8k_model_solutions.jsonl          right solutions
    ... --answer_key 175b_verification.solution --where 175b_verification.is_correct                  of one model

Rows with a chat (`messages`, or `conversations` with from and value) are copied. Other rows become chats in which the
solution, with its ground truth boxed, answers the question. If there are labelled solutions `{solution, is_correct}` in
columns of any name or in a list `solutions`, each right one becomes a chat, at most --max_solutions per problem. The
right answers in results.jsonl of main_generation become chats, too. Writes <local_dir>/<split>.parquet.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from alphaapollo.data.chats import read_chat
from alphaapollo.data.files import DataRow
from alphaapollo.types import Message
from examples.data_preprocess.columns import (
    Columns,
    Dropped,
    Problem,
    find_problem,
    find_question,
    ground_truth_of,
    is_prose,
    is_unicode,
    labelled_solutions,
)
from examples.data_preprocess.common import (
    INSTRUCTION,
    SFT_SCHEMA,
    MakeRow,
    Script,
    output_folder,
    run,
    source_name,
)
from examples.data_preprocess.prepare_right_answers import is_results_file
from examples.data_preprocess.prepare_right_answers import prepare as prepare_right_answers
from examples.data_preprocess.protocol import TOOL_INSTRUCTION, plain_turns, tool_turns

CHAT_KEYS = ("messages", "conversations", "conversation")
PROTOCOLS = {"plain": (INSTRUCTION, plain_turns), "tools": (TOOL_INSTRUCTION, tool_turns)}

Chat = tuple[list[Message], str | None]  # and its ground truth, where it is a problem's


def chats_of(row: DataRow, protocol: str, max_solutions: int, columns: Columns) -> list[Chat]:
    """Chats of a row. Raises Dropped if there are none."""
    for key in CHAT_KEYS:
        if row.get(key) is not None:
            return [(read_messages(row[key], key), None)]
    instruction, turns = PROTOCOLS[protocol]
    chats: list[Chat] = []
    problem = Dropped("no right solution")
    for one in problems_of(row, columns):
        asked = Message(role="user", content=f"{one.question}\n\n{instruction}")
        try:
            chats.append(([asked, *turns(one.solution, one.ground_truth)], one.ground_truth))
        except Dropped as reason:
            problem = reason
    if not chats:
        raise problem
    return chats[:max_solutions]


def problems_of(row: DataRow, columns: Columns) -> list[Problem]:
    """The problem with its own answer, or with each right one of its labelled solutions unless --answer_key is given.

    Raises:
        Dropped: the row has no problem or no right solution.
    """
    labelled = [] if columns.answer else labelled_solutions(row)
    if not labelled:
        return [find_problem(row, columns)]
    _, question = find_question(row, columns)
    try:
        truth = find_problem(row, columns).ground_truth
    except Dropped:
        truth = ""
    problems = []
    for solution, is_right in labelled:
        answer = truth or ground_truth_of(solution)
        if is_right and not is_prose(answer):
            problems.append(Problem(question, answer, solution, {}))
    return problems


def read_messages(value: Any, key: str) -> list[Message]:
    """Read a chat. Raises Dropped if the row has none or the assistant has no text."""
    if not isinstance(value, list) or not value:
        raise Dropped(f"the chat is not a list of messages (column {key})")
    try:
        chat = read_chat(value, key)
    except ValueError as error:
        raise Dropped(f"a message is not {{role, content}} with text (column {key})") from error
    if any({"tool_calls", "reasoning_content", "train"} & one.keys() for one in chat):
        raise Dropped(f"the chat has tool calls, thoughts or weights; train on the file itself (column {key})")
    messages = [Message(role=one["role"], content=one["content"]) for one in chat]
    if not all(is_unicode(one["content"]) for one in messages):
        raise Dropped(f"a message is not valid Unicode (column {key})")
    said = [one["content"] for one in messages if one["role"] == "assistant"]
    if not said or not all(text.strip() for text in said):
        raise Dropped(f"no text of the assistant (column {key})")
    return messages


def describe(chats: Sequence[DataRow]) -> str:
    turns = sum(message["role"] == "assistant" for chat in chats for message in chat["messages"])
    return f"{turns} assistant turns"


def make_chats(args: argparse.Namespace, data_source: str, split: str) -> MakeRow:
    def make(row: DataRow, index: int) -> list[DataRow]:
        facts = {"split": split, "index": index}
        return [
            {"data_source": data_source, "messages": messages, "extra_info": {**facts, "ground_truth": truth}}
            for messages, truth in chats_of(row, args.protocol, args.max_solutions, args.columns)
        ]

    return make


OPTIONS: dict[str, dict[str, Any]] = {
    "--protocol": {"choices": list(PROTOCOLS), "default": "plain", "help": "format of the solutions"},
    "--max_solutions": {"type": int, "default": 4, "help": "maximum labelled solutions per problem"},
}
SCRIPT = Script(__doc__, make_chats, OPTIONS, ["train"], folder="sft/{}", schema=SFT_SCHEMA, describe=describe)


def prepare(args: argparse.Namespace) -> None:
    """Write each split of the source. Raises ValueError if it cannot be read or has no usable row."""
    if args.max_solutions < 1:
        raise ValueError(f"--max_solutions {args.max_solutions}: must be at least 1.")
    if is_results_file(args.data_source):
        folder = output_folder(args.local_dir, f"sft/{source_name(args.data_source)}")
        prepare_right_answers([args.data_source], folder, 1.0, args.max_solutions, shortest=False)
    else:
        SCRIPT.write(args)


def main() -> None:
    args = SCRIPT.parse()
    run(lambda: prepare(args))


if __name__ == "__main__":
    main()
