"""Common formats of data sets. Files without the configured columns are converted to them, if they have a known format.

A chat in `messages` or in two columns, ShareGPT, Alpaca, TRL's prompt and completion, plain text; pairs and labelled
answers of ms-swift; questions with answers, and chats, for RL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from alphaapollo.data.chats import read_chat_text
from alphaapollo.data.files import DataRow, DataRows, list_column_names, read_rows
from alphaapollo.data.findings import DataFinding, find_unread_content
from alphaapollo.utils.json_types import Json

if TYPE_CHECKING:
    from alphaapollo.data.rendering import Renderer

RESULT_COLUMNS = ("prompt_id", "turns", "rows")  # of results.jsonl and rollouts/
LOG_COLUMNS = ("prompt_id", "sample", "outcome")  # of these files and of scores.jsonl


@dataclass(frozen=True)
class DataFormat:
    """Format of a data file, and its conversion."""

    name: str
    columns: tuple[str, ...]  # columns that a file must have
    convert: Callable[[DataRow], DataRow]  # returns columns that can be configured, e.g. prompt and response
    optional: tuple[str, ...] = ()  # columns that the conversion also reads


def read_rows_in_known_format(
    path: str,
    needed: Sequence[Collection[str]],
    formats: Sequence[DataFormat],
    names: Mapping[str, str],
    optional: Collection[str] | None = None,
    renderer: Renderer | None = None,
) -> tuple[DataRows, list[DataFinding]]:
    """Read a data file, and convert its rows if it has the columns of a known format instead of the configured ones.

    Args:
        needed: alternative groups of configured columns; a file with all columns of a group is not converted.
        formats: known formats; the first one whose columns the file has is used.
        names: {column that a format returns: configured name of this column}.
        optional: columns that are also read; None if all columns are.

    Returns rows, and findings about their conversion and about content that is not read. Raises ValueError if the file
    is unreadable or of no known format.
    """
    rows = read_rows(path)
    columns = {*list_column_names(rows)}
    if any({*group} <= columns for group in needed):
        return rows, find_unread_content(path, rows, {*names.values()}, optional, renderer)
    candidates = () if {*RESULT_COLUMNS} <= columns else formats
    if found := next((candidate for candidate in candidates if {*candidate.columns} <= columns), None):
        converted = (row | {names.get(key, key): value for key, value in found.convert(row).items()} for row in rows)
        names_read = f"the column{'s' * (len(found.columns) > 1)} {', '.join(found.columns)}"
        conversion = DataFinding(path, names_read, f"read as {found.name}", len(rows), len(rows))
        unread = find_unread_content(path, rows, {*found.columns, *found.optional}, optional, renderer)
        return DataRows(converted, rows.locations, rows.source), [conversion, *unread]
    missing = " or ".join(" and ".join(map(repr, group)) for group in needed)
    keys = ", ".join(f"data.{name}_key" for name in names)
    raise ValueError(
        f"{path}: no column {missing}. The file has {', '.join(map(repr, list_column_names(rows)))}. Set {keys} to its "
        f"columns, or use another format of docs/data.md.{_suggest_command(path, columns, names)}"
    )


def _suggest_command(path: str, columns: Collection[str], names: Collection[str]) -> str:
    """Return a sentence with the command that reads a file with these columns; empty if there is none. names: columns
    that were needed; a script in examples/data_preprocess may convert the file to a file with them."""
    scripts = {"messages": "prepare_sft", "chosen": "prepare_preference", "label": "prepare_preference"}
    script = next(
        (f"python -m examples.data_preprocess.{scripts[name]} --data_source" for name in names if name in scripts), ""
    )
    read_by_script = [RESULT_COLUMNS, ("question", "answer")] if "messages" in names else [RESULT_COLUMNS]
    commands: list[tuple[str, Sequence[Collection[str]]]] = [
        (script, (read_by_script if script else [])),
        ("alphaapollo dpo data.train_files", [("chosen", "rejected")]),
        ("alphaapollo dpo preference.loss=kto data.train_files", [("completion", "label"), ("response", "label")]),
        ("alphaapollo sft data.train_files", [("messages",), *(known.columns for known in SFT_FORMATS)]),
        ("alphaapollo rl data.train_files", [("data_source", "prompt", "reward_model")]),
    ]
    found = (command for command, groups in commands if any({*group} <= {*columns} for group in groups))
    return next((f" To use this file: {command}={path}" for command in found), "")


def _make_messages(value: Json, role: str = "assistant") -> list[Json]:
    """Return the messages in a list or in a text; any other value (a text, or parts) becomes one message."""
    chat = read_chat_text(value) or value
    is_chat = isinstance(chat, list) and all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in chat)
    return chat if is_chat else [{"role": role, "content": value}]


def _make_chat(question: Json, *answers: Json) -> list[Json]:
    return [*_make_messages(question, "user"), *chain(*map(_make_messages, answers))]


def _split_turns(turns: Json) -> Json:
    """Convert ms-swift's turns, [{"human": ..., "assistant": ...}, ...], to messages; other chats are unchanged."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "human" in turn for turn in turns):
        return turns
    return [message for turn in turns for message in _make_chat(turn["human"], turn.get("assistant"))]


def _split_last_answer(row: DataRow) -> tuple[list[Json], list[Json]]:
    """Return a chat up to its last user message, and the messages after it. Raises ValueError without user message."""
    messages: list[Json] = read_chat_text(row["messages"]) or row["messages"] or []
    roles = [str(message.get("role", message.get("from"))) for message in messages]
    ends = [number for number, role in enumerate(roles, 1) if role in ("user", "human")]
    if not ends:
        raise ValueError("'messages' has no message of the user. Add one.")
    return messages[: ends[-1]], messages[ends[-1] :]


def _read_messages_with_rejected(row: DataRow) -> DataRow:
    """Read ms-swift's pairs: the answer of `messages`, and `rejected_response`, a text or messages."""
    if row.get("rejected_images") not in (None, [], row.get("images")):
        raise ValueError("'rejected_images' has other images than 'images'; both answers need the same prompt.")
    if row.get("rejected_messages") is not None:
        return {"chosen": row["messages"], "rejected": row["rejected_messages"]}
    prompt, answer = _split_last_answer(row)
    return {"prompt": prompt, "chosen": answer, "rejected": _make_messages(row["rejected_response"])}


def _read_labelled_messages(row: DataRow) -> DataRow:
    prompt, answer = _split_last_answer(row)
    return {"prompt": prompt, "response": answer, "label": row["label"]}


def _join_instruction(row: DataRow) -> Json:
    """Join the texts of the columns `instruction` and `input`. A value that is not text is returned, to be refused."""
    parts = [*filter(None, (row.get("instruction"), row.get("input")))]
    return next((part for part in parts if not isinstance(part, str)), None) or "\n\n".join(parts)


SFT_FORMATS = (
    DataFormat("ShareGPT chats", ("conversations",), lambda row: {"messages": row.get("conversations")}),
    DataFormat("ShareGPT chats", ("conversation",), lambda row: {"messages": _split_turns(row.get("conversation"))}),
    DataFormat(
        "Alpaca instructions",
        ("instruction", "output"),
        lambda row: {"messages": _make_chat(_join_instruction(row), row.get("output"))},
        ("input",),
    ),
    DataFormat(
        "queries and responses",
        ("query", "response"),
        lambda row: {"messages": _make_chat(row["query"], row.get("response"))},
    ),
    DataFormat(
        "prompts and completions",
        ("prompt", "completion"),
        lambda row: {"prompt": row.get("prompt"), "response": row.get("completion")},
    ),
    DataFormat("plain text, trained on as a whole", ("text",), lambda row: {}),
)
LABELLED_FORMATS = (
    DataFormat(
        "labelled completions",
        ("prompt", "completion", "label"),
        lambda row: {"prompt": row["prompt"], "response": row["completion"], "label": row["label"]},
    ),
    DataFormat("labelled chats", ("messages", "label"), _read_labelled_messages),
)
PAIR_FORMATS = (
    DataFormat("chats with rejected answers", ("messages", "rejected_response"), _read_messages_with_rejected),
    DataFormat("chats with rejected chats", ("messages", "rejected_messages"), _read_messages_with_rejected),
    DataFormat(
        "queries, responses and rejected responses",
        ("query", "response", "rejected_response"),
        lambda row: {
            "prompt": _make_chat(row["query"]),
            "chosen": _make_messages(row["response"]),
            "rejected": _make_messages(row["rejected_response"]),
        },
    ),
)


def _make_prompt(row: DataRow, column: str) -> DataRow:
    question = row.get(column)
    return {"prompt": None if question is None else _make_chat(question)}


PROMPT_FORMATS = (
    *(
        DataFormat("questions, each asked in a chat", (name,), partial(_make_prompt, column=name))
        for name in ("question", "problem", "Question", "Problem", "query")
    ),
    DataFormat(
        "chats, of which the last answer is removed",
        ("messages",),
        lambda row: {"prompt": _split_last_answer(row)[0], "messages": None},
    ),
)


def _make_instruction_prompt(row: DataRow) -> DataRow:
    return {"prompt": _make_chat(_join_instruction(row))}


def make_pair_formats(chosen: str, rejected: str) -> list[DataFormat]:
    """Return the formats of files that have the columns of a pair, but not the column of its prompt."""
    pair, questions = (chosen, rejected), ("input", "problem", "Question", "Problem", "query")
    return [
        DataFormat("pairs with prompts", ("conversations", *pair), lambda row: {"prompt": row.get("conversations")}),
        DataFormat("pairs with prompts", ("question", *pair), lambda row: {"prompt": row.get("question")}),
        DataFormat("pairs with Alpaca instructions", ("instruction", *pair), _make_instruction_prompt, ("input",)),
        *(DataFormat("pairs with questions", (name, *pair), partial(_make_prompt, column=name)) for name in questions),
        DataFormat("pairs, whose common beginning is the prompt", pair, lambda row: {}),
    ]
