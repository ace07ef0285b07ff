r"""Supervised data: chats in a `messages` column, of which the assistant's turns are trained on.

    python -m examples.data_preprocess.prepare_sft --data_source gsm8k_train.jsonl                    one turn a problem
    python -m examples.data_preprocess.prepare_sft --data_source gsm8k_train.jsonl --protocol tools   with tool turns

Rows that hold a chat (`messages`, or `conversations` with from and value) are taken as they are; of others, the
question is asked and the solution answers, its ground truth boxed. Writes <local_dir>/<split>.parquet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from alphaapollo.data.files import DataRow
from alphaapollo.data.prompts import read_chat
from alphaapollo.types import Message
from examples.data_preprocess.common import (
    CHAT,
    INSTRUCTION,
    Dropped,
    convert,
    data_source_of,
    find_problem,
    finish,
    is_unicode,
    output_folder,
    read_splits,
    run,
    source_name,
    source_parser,
)
from examples.data_preprocess.protocol import TOOL_INSTRUCTION, plain_turns, tool_turns

CHAT_KEYS = ("messages", "conversations", "conversation")
ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
PROTOCOLS = {"plain": (INSTRUCTION, plain_turns), "tools": (TOOL_INSTRUCTION, tool_turns)}
SFT_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "messages": CHAT,
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "ground_truth": pa.string()}),
    }
)


def messages_of(row: DataRow, protocol: str) -> tuple[list[Message], str | None]:
    """The chat of a row, and its ground truth where it is a problem (Dropped: it has neither chat nor problem)."""
    for key in CHAT_KEYS:
        if row.get(key) is not None:
            return read_messages(row[key], key), None
    problem = find_problem(row)
    instruction, turns = PROTOCOLS[protocol]
    asked = Message(role="user", content=f"{problem.question}\n\n{instruction}")
    return [asked, *turns(problem.solution, problem.ground_truth)], problem.ground_truth


def read_messages(value: Any, key: str) -> list[Message]:
    """A chat with something from the assistant in it (Dropped: it is none)."""
    if not isinstance(value, list) or not value:
        raise Dropped(f"the chat is not a list of messages (column {key})")
    renamed = [
        {"role": ROLES.get(one["from"], one["from"]), "content": one.get("value")}
        if isinstance(one, dict) and isinstance(one.get("from"), str)
        else one
        for one in value
    ]
    try:
        messages = [Message(role=one["role"], content=one["content"]) for one in read_chat(renamed, key)]
    except ValueError as error:
        raise Dropped(f"a message is not {{role, content}} with text (column {key})") from error
    if not all(is_unicode(one["content"]) for one in messages):
        raise Dropped(f"a message is not valid Unicode (column {key})")
    said = [one["content"] for one in messages if one["role"] == "assistant"]
    if not said or not all(text.strip() for text in said):
        raise Dropped(f"the assistant says nothing (column {key})")
    return messages


def prepare(source: str, folder: Path, splits: Sequence[str], config_name: str | None, protocol: str) -> None:
    """Write each split that the source has (ValueError: it cannot be read, or has no usable row)."""
    data_source = data_source_of(source, fallback="math")
    for split, rows in read_splits(source, splits, config_name).items():

        def make(row: DataRow, index: int, split: str = split) -> DataRow:
            messages, truth = messages_of(row, protocol)
            facts = {"split": split, "index": index, "ground_truth": truth}
            return {"data_source": data_source, "messages": messages, "extra_info": facts}

        made, count = convert(rows, make, split)
        turns = sum(message["role"] == "assistant" for row in made for message in row["messages"])
        finish(made, count, folder / f"{split}.parquet", f"{turns} assistant turns", SFT_SCHEMA)


def main() -> None:
    parser = source_parser(__doc__, ["train"])
    parser.add_argument("--protocol", choices=list(PROTOCOLS), default="plain", help="how solutions are written")
    args = parser.parse_args()
    folder = output_folder(args.local_dir, f"sft/{source_name(args.data_source)}")
    run(lambda: prepare(args.data_source, folder, args.splits, args.config_name, args.protocol))


if __name__ == "__main__":
    main()
