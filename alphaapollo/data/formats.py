"""Common formats of data sets. Files without the configured columns are converted to them, if they have a known format.

A chat in `messages` or in two columns, ShareGPT, Alpaca, TRL's prompt and completion, plain text; questions with
answers for RL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from alphaapollo.data.files import DataRow, DataRows, list_column_names, read_rows

PURPOSES = {"messages": "sft", "chosen": "preference", "label": "preference"}  # name of a column -> suggest_command
RESULT_COLUMNS = ("prompt_id", "turns", "rows")  # results.jsonl and rollouts/


@dataclass(frozen=True)
class DataFormat:
    """Format of a data file, and its conversion."""

    name: str
    columns: tuple[str, ...]  # columns that a file must have
    convert: Callable[[DataRow], DataRow]  # returns a row with the columns messages, prompt, response or text
    optional: tuple[str, ...] = ()  # columns that the conversion also reads


def read_rows_in_known_format(
    path: str,
    needed: Sequence[Collection[str]],
    formats: Sequence[DataFormat],
    names: Mapping[str, str],
    optional: Collection[str] | None = None,
) -> tuple[DataRows, list[str]]:
    """Read a data file, and convert its rows if it has the columns of a known format instead of the configured ones.

    Args:
        needed: alternative groups of configured columns; a file with all columns of a group is not converted.
        formats: known formats; the first one whose columns the file has is used.
        names: {column that a format returns: configured name of this column}.
        optional: columns that are also read; None if all columns are.

    Returns rows, and a notice if they were converted or have columns that are not read. Raises ValueError if a file is
    unreadable or of no known format.
    """
    rows = read_rows(path)
    columns = list_column_names(rows)
    if group := next((group for group in needed if {*group} <= {*columns}), None):
        unread = describe_unread_columns(rows, optional and (*group, *optional))
        return rows, [f"{path}: {unread}"] if unread else []
    for one in () if {*RESULT_COLUMNS} <= {*columns} else formats:
        if {*one.columns} <= {*columns}:
            converted = ({names.get(key, key): value for key, value in one.convert(row).items()} for row in rows)
            unread = describe_unread_columns(rows, optional and (*one.columns, *one.optional, *optional))
            return DataRows(converted, rows.locations), [
                f"{path} is read as {one.name} ({', '.join(one.columns)}). {unread}".strip()
            ]
    purpose = next((purpose for name, purpose in PURPOSES.items() if name in names), "rl")
    missing = " or ".join(" and ".join(map(repr, group)) for group in needed)
    raise ValueError(
        f"{path}: no column {missing}. The file has {', '.join(map(repr, columns))}. Set "
        f"{', '.join(f'data.{name}_key' for name in names)} to its columns, or use another format of docs/data.md."
        f"{suggest_command(path, columns, purpose)}"
    )


def describe_unread_columns(rows: Sequence[DataRow], read: Collection[str] | None) -> str:
    """Return a sentence with the columns that have values and are not in `read`; empty if there are none or `read` is
    None. `data_source` is left out: it only names the data."""
    known = {*(read or ()), "data_source"}
    unread = {} if read is None else {name: 1 for row in rows for name in row.keys() - known if row[name] is not None}
    return f"Columns that are not read: {', '.join(sorted(unread))}." if unread else ""


def suggest_command(path: str, columns: Collection[str], purpose: str) -> str:
    """Return a sentence with the command that reads a file with these columns; empty if there is none.

    purpose: "sft" or "preference", for which a script in examples/data_preprocess prepares some files, or "rl".
    """
    script = f"python -m examples.data_preprocess.prepare_{purpose} --data_source"
    prepared: dict[str, list[tuple[str, ...]]] = {
        "sft": [RESULT_COLUMNS, ("question", "answer")],
        "preference": [RESULT_COLUMNS],
        "rl": [],
    }
    commands: dict[str, Sequence[Collection[str]]] = {
        script: prepared[purpose],
        "alphaapollo dpo data.train_files": [("chosen", "rejected")],
        "alphaapollo dpo preference.loss=kto data.train_files": [("completion", "label"), ("response", "label")],
        "alphaapollo sft data.train_files": [("messages",), *(one.columns for one in SFT_FORMATS)],
        "alphaapollo rl data.train_files": [("data_source", "prompt", "reward_model")],
    }
    for command, groups in commands.items():
        if any({*group} <= {*columns} for group in groups):
            return f" To use this file: {command}={path}"
    return ""


def _convert_chat(row: DataRow, column: str) -> DataRow:
    return row | {"messages": row.get(column)}


def _convert_alpaca(row: DataRow) -> DataRow:
    question = "\n\n".join(filter(None, (row.get("instruction"), row.get("input"))))
    return row | {"messages": [_ask(question), {"role": "assistant", "content": row.get("output")}]}


def _convert_query(row: DataRow) -> DataRow:
    return row | {"messages": [_ask(row["query"]), {"role": "assistant", "content": row.get("response")}]}


def _convert_completion(row: DataRow) -> DataRow:
    return row | {"response": row.get("completion")}


def _convert_question(row: DataRow, column: str) -> DataRow:
    question = row.get(column)
    return row | {"prompt": None if question is None else [_ask(question)]}


def _ask(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


SFT_FORMATS = (
    *(
        DataFormat("ShareGPT chats", (name,), partial(_convert_chat, column=name))
        for name in ("conversations", "conversation")
    ),
    DataFormat("Alpaca instructions", ("instruction", "output"), _convert_alpaca, ("input",)),
    DataFormat("queries and responses", ("query", "response"), _convert_query),
    DataFormat("prompts and completions", ("prompt", "completion"), _convert_completion),
    DataFormat("plain text, trained on as a whole", ("text",), lambda row: {"text": row.get("text")}),
)
LABELLED_FORMATS = (DataFormat("labelled completions", ("prompt", "completion", "label"), _convert_completion),)
PROMPT_FORMATS = tuple(
    DataFormat("questions, each asked in a chat", (name,), partial(_convert_question, column=name))
    for name in ("question", "problem", "Question", "Problem")
)
