"""Read prompts from data files in verl's format.

Columns: `prompt` (required; data.prompt_key renames it), `images` (pictures for the marks `<image>` of the prompt),
`data_source`, `reward_model: {ground_truth}`, `extra_info`, `env_kwargs`, `metadata` (a JSON string; read into
extra_info). The ground truth may also be in a column `ground_truth` or `answer`. Other columns are added to extra_info.
Only `data_source` selects the reward function. `reward_model.style` and `ability` are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from alphaapollo.data.chats import read_chat, shorten_repr
from alphaapollo.data.files import DataRow, convert_rows, to_file_list
from alphaapollo.data.formats import PROMPT_FORMATS, read_rows_in_known_format
from alphaapollo.data.image_messages import IMAGES, PictureReader, RowPictures
from alphaapollo.types import JsonObject, Message, Prompt

READ_COLUMNS = (IMAGES, "data_source", "reward_model", "extra_info", "env_kwargs", "metadata", "ability")


def load_prompts(
    files: str | Sequence[str], prompt_key: str, notices: list[str] | None = None, allow_image_urls: bool = False
) -> list[Prompt]:
    """Load the prompts of data files, in order. `Prompt.id` is the index of the row over all files.

    A file without the column `prompt_key` may have questions instead (PROMPT_FORMATS), which is added to `notices`.
    Raises ValueError for an unreadable file, missing columns, invalid rows or pictures, or a mix of chats and texts.
    """
    prompts: list[Prompt] = []
    for path in to_file_list(files):
        rows, converted = read_rows_in_known_format(path, [(prompt_key,)], PROMPT_FORMATS, {"prompt": prompt_key})
        if notices is not None:
            notices += converted
        contents = (row[prompt_key] for row in rows if row.get(prompt_key) is not None)
        is_chat = isinstance(prompts[0].content if prompts else next(contents, None), list)
        reader = PictureReader(Path(path).expanduser().parent, allow_image_urls)
        convert = partial(_convert_row_to_prompt, prompt_key=prompt_key, is_chat=is_chat, reader=reader)
        prompts += convert_rows(path, rows, convert)
    return [replace(prompt, id=index) for index, prompt in enumerate(prompts)]


def _convert_row_to_prompt(row: DataRow, prompt_key: str, is_chat: bool, reader: PictureReader) -> Prompt:
    reward_model, extra_info, env_kwargs = (
        _read_struct_column(row, key) for key in ("reward_model", "extra_info", "env_kwargs")
    )
    if row.get("metadata"):
        extra_info = {**extra_info, "metadata": _parse_metadata(row["metadata"])}
    read = {prompt_key, *READ_COLUMNS}
    extra_info = {key: value for key, value in row.items() if key not in read and value is not None} | extra_info
    truths = [section.get("ground_truth") for section in (reward_model, extra_info, env_kwargs, row)]
    truths.append(row.get("answer"))
    data_source = row.get("data_source")
    if not isinstance(data_source, str | None):
        raise ValueError(f"data_source is {shorten_repr(data_source)}; it must be text. Convert it to text.")
    return Prompt(
        id=0,
        data_source=data_source or "",
        content=_read_prompt_content(row, prompt_key, is_chat, reader),
        ground_truth=_convert_ground_truth_to_text(next((truth for truth in truths if truth is not None), None)),
        extra_info=extra_info,
        env_kwargs=env_kwargs,
    )


def _read_prompt_content(row: DataRow, prompt_key: str, is_chat: bool, reader: PictureReader) -> list[Message] | str:
    """Return the chat of a row with its pictures, or its text. Raises ValueError if it is invalid, or a chat where
    `is_chat` is False or vice versa."""
    value, label = row.get(prompt_key), f"{prompt_key!r}"
    if value is None:
        raise ValueError(f"{label} is missing. Fill it or remove the row.")
    if not isinstance(value, str | list):
        raise ValueError(f"{label} is {shorten_repr(value)}; it must be text or a list of chat messages.")
    if isinstance(value, list) != is_chat:
        kinds = ("a text", "a chat") if is_chat else ("a chat", "a text")
        raise ValueError(f"{label} is {kinds[0]}, but the first prompt is {kinds[1]}. Use chats or texts, not both.")
    pictures = RowPictures.from_row(row, reader)
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{label} is empty. Fill it or remove the row.")
        pictures.check_is_empty(prompt_key)
        return value
    messages = pictures.place(read_chat(value, label, reader))
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{label} ends with an assistant message. Remove it; the model generates the answer.")
    return messages


def _read_struct_column(row: DataRow, column: str) -> JsonObject:
    value = row.get(column)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{column!r} is {shorten_repr(value)}; it must be a struct (dict).")
    # parquet adds the keys of all rows to each row, with the value None
    return {name: part for name, part in value.items() if part is not None}


def _parse_metadata(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"'metadata' is not valid JSON ({error}). Fix or remove it.") from error


def _convert_ground_truth_to_text(truth: object) -> str | None:
    """Convert a ground truth to text. A list or dict (several accepted answers) becomes JSON.

    Raises ValueError for bytes and NaN, which no answer can equal.
    """
    if truth is None or isinstance(truth, str):
        return truth
    if isinstance(truth, bytes) or truth != truth:
        kind = "bytes" if isinstance(truth, bytes) else "NaN"
        raise ValueError(f"ground_truth={shorten_repr(truth)} is {kind}, so no answer matches. Set a text or number.")
    return json.dumps(truth, ensure_ascii=False) if isinstance(truth, list | dict) else str(truth)
