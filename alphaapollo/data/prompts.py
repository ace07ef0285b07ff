"""Convert data rows to prompts.

Columns: `prompt` (required; another name with data.prompt_key), `data_source`, `reward_model: {ground_truth}`,
`extra_info`, `env_kwargs`, `metadata` (a JSON string; read into extra_info). The reward function is chosen by
`data_source` alone, so `reward_model.style` and `ability` are free for the user's own bookkeeping.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from alphaapollo.data.files import DataRow, convert_rows, list_column_names, read_rows, to_file_list
from alphaapollo.types import Message, Prompt


def load_prompts(files: str | Sequence[str], prompt_key: str) -> list[Prompt]:
    """Load the prompts of parquet or jsonl files, in order; `Prompt.id` is the index over all files. Raises ValueError
    if a file is missing, unreadable or empty, has no column `prompt_key`, or has invalid rows; or the files mix chats
    and texts."""
    prompts: list[Prompt] = []
    for path in to_file_list(files):
        rows = read_rows(path)
        if prompt_key not in (columns := list_column_names(rows)):
            raise ValueError(
                f"{path}: no column {prompt_key!r}. It has {', '.join(columns)}. {_suggest_fix(columns, path)}"
            )
        chat = isinstance((prompts[0].content if prompts else _first_content(rows, prompt_key)), list)
        prompts += convert_rows(path, rows, partial(_to_prompt, prompt_key=prompt_key, chat=chat))
    return [replace(prompt, id=index) for index, prompt in enumerate(prompts)]


def read_chat(value: list[Any], label: str) -> list[Message]:
    """Convert a list of {role, content} from a data file to messages, without keys whose value is None.

    label: start of error messages. Raises ValueError if a message is malformed or all contents are empty.
    """
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{label} has a message that is not {{role, content}}: {_shorten(message)}.")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{label} has a message whose content is not text: {_shorten(message)}.")
        messages.append(cast(Message, {key: part for key, part in message.items() if part is not None}))
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{label} is empty.")
    return messages


def _suggest_fix(columns: Sequence[str], path: str) -> str:
    """Suggest a fix for data without a prompt column: for question-answer data, the script that converts it."""
    if {"question", "problem", "Problem", "Question"} & {*columns}:
        script = f"python -m examples.data_preprocess.prepare_informal_math --data_source {path}"
        return f"Convert raw problems to prompts with {script} (docs/data.md), or set data.prompt_key."
    return "Set data.prompt_key to the column with the prompts."


def _to_prompt(row: DataRow, prompt_key: str, chat: bool) -> Prompt:
    """Convert a data row to a prompt with id 0."""
    reward_model, extra_info, env_kwargs = (
        _read_section(row, key) for key in ("reward_model", "extra_info", "env_kwargs")
    )
    if row.get("metadata"):
        extra_info = {**extra_info, "metadata": _parse_metadata(row["metadata"])}
    truths = (section.get("ground_truth") for section in (reward_model, extra_info, env_kwargs))
    data_source = row.get("data_source")
    if not isinstance(data_source, str | None):
        raise ValueError(f"data_source is not text: {_shorten(data_source)}.")
    return Prompt(
        id=0,
        data_source=data_source or "",
        content=_read_content(row.get(prompt_key), prompt_key, chat),
        ground_truth=_to_text(next((truth for truth in truths if truth is not None), None)),
        extra_info=extra_info,
        env_kwargs=env_kwargs,
    )


def _read_content(value: Any, prompt_key: str, chat: bool) -> list[Message] | str:
    label = f"{prompt_key!r}"
    if value is None:
        raise ValueError(f"{label} is missing.")
    if not isinstance(value, str | list):
        raise ValueError(f"{label} is a {type(value).__name__}; it must be a chat [{{role, content}}] or a text.")
    if isinstance(value, list) != chat:
        kinds = ("a text", "a chat") if chat else ("a chat", "a text")
        raise ValueError(f"{label} is {kinds[0]}, but the first prompt is {kinds[1]}. Use one kind for all prompts.")
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{label} is empty.")
        return value
    messages = read_chat(value, label)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{label} ends with an assistant message. Remove it; the model generates the answer.")
    return messages


def _first_content(rows: Sequence[DataRow], prompt_key: str) -> Any:
    return next((row[prompt_key] for row in rows if row.get(prompt_key) is not None), None)


def _read_section(row: DataRow, key: str) -> dict[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key!r} is a {type(value).__name__}; it must be a struct: {_shorten(value)}.")
    # parquet adds the keys of all rows to each row, with the value None
    return {name: part for name, part in value.items() if part is not None}


def _parse_metadata(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"'metadata' is not valid JSON ({error}).") from error


def _to_text(truth: Any) -> str | None:
    """Convert a ground truth to text; lists and dicts (several accepted answers) become JSON.

    Raises ValueError for bytes and NaN, which no answer can equal.
    """
    if truth is None or isinstance(truth, str):
        return truth
    if isinstance(truth, bytes) or truth != truth:
        kind = "bytes" if isinstance(truth, bytes) else "not a number"
        raise ValueError(f"ground_truth={_shorten(truth)} is {kind}. Write it as text.")
    return json.dumps(truth, ensure_ascii=False) if isinstance(truth, list | dict) else str(truth)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
