"""Common formats of data sets. Files without the configured columns are converted to them, if they have a known format.

A chat in `messages` or in two columns, ShareGPT, Alpaca, TRL's prompt and completion, plain text; questions with
answers for RL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from alphaapollo.data.files import DataRow, list_column_names, read_rows

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
RESULT_COLUMNS = ("prompt_id", "turns", "rows")  # results.jsonl and rollouts/


@dataclass(frozen=True)
class DataFormat:
    """Format of a data file, and its conversion."""

    name: str
    columns: tuple[str, ...]  # columns that a file must have
    convert: Callable[[DataRow], DataRow]  # returns a row with the columns messages, prompt, response or text


def read_rows_in_known_format(
    path: str, needed: Sequence[Collection[str]], formats: Sequence[DataFormat], names: Mapping[str, str]
) -> tuple[list[DataRow], list[str]]:
    """Read a data file, and convert its rows if it has the columns of a known format instead of the configured ones.

    Args:
        needed: alternative groups of configured columns; a file with all columns of a group is not converted.
        formats: known formats; the first one whose columns the file has is used.
        names: {column that a format returns: configured name of this column}.

    Returns rows, and a notice if they were converted. Raises ValueError if a file is unreadable or of no known format.
    """
    rows = read_rows(path)
    columns = list_column_names(rows)
    if any({*group} <= {*columns} for group in needed):
        return rows, []
    for one in () if {*RESULT_COLUMNS} <= {*columns} else formats:
        if {*one.columns} <= {*columns}:
            converted = [{names.get(key, key): value for key, value in one.convert(row).items()} for row in rows]
            return converted, [f"{path} is read as {one.name} ({', '.join(one.columns)})."]
    purpose = "sft" if "messages" in names else "rl"
    raise make_column_error(path, columns, needed, [f"data.{name}_key" for name in names], purpose)


def make_column_error(
    path: str, columns: Collection[str], needed: Sequence[Collection[str]], keys: Sequence[str], purpose: str
) -> ValueError:
    """Return an error for a file without the needed columns, with a command that reads the file if there is one."""
    missing = " or ".join(" and ".join(map(repr, group)) for group in needed)
    return ValueError(
        f"{path}: no column {missing}. The file has {', '.join(map(repr, columns))}. Set {', '.join(keys)} to its "
        f"columns, or use another format of docs/data.md.{suggest_command(path, columns, purpose)}"
    )


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


def _convert_sharegpt(row: DataRow, column: str) -> DataRow:
    chat = row.get(column)
    if isinstance(chat, list) and all(isinstance(one, dict) and "from" in one for one in chat):
        chat = [{"role": SHAREGPT_ROLES.get(one["from"], one["from"]), "content": one.get("value")} for one in chat]
    return {"messages": chat}


def _convert_alpaca(row: DataRow) -> DataRow:
    question = "\n\n".join(filter(None, (row.get("instruction"), row.get("input"))))
    return {"messages": [_ask(question), {"role": "assistant", "content": row.get("output")}]}


def _convert_completion(row: DataRow) -> DataRow:
    return row | {"response": row.get("completion")}


def _convert_question(row: DataRow, column: str) -> DataRow:
    question = row.get(column)
    return row | {"prompt": None if question is None else [_ask(question)]}


def _ask(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


SFT_FORMATS = (
    *(
        DataFormat("ShareGPT chats", (name,), partial(_convert_sharegpt, column=name))
        for name in ("conversations", "conversation")
    ),
    DataFormat("Alpaca instructions", ("instruction", "output"), _convert_alpaca),
    DataFormat("prompts and completions", ("prompt", "completion"), _convert_completion),
    DataFormat("plain text, trained on as a whole", ("text",), lambda row: {"text": row.get("text")}),
)
LABELLED_FORMATS = (DataFormat("labelled completions", ("prompt", "completion", "label"), _convert_completion),)
PROMPT_FORMATS = tuple(
    DataFormat("questions, each asked in a chat", (name,), partial(_convert_question, column=name))
    for name in ("question", "problem", "Question", "Problem")
)
