"""Read prompts from data files in verl's format.

Columns: `prompt` (required; data.prompt_key renames it), `images` (images for the marks `<image>` of the prompt),
`data_source`, `reward_model: {ground_truth}`, `extra_info`, `env_kwargs`, `metadata` (a JSON string; read into
extra_info). The ground truth may also be in a column `ground_truth`, `answer` or one of TRUTH_COLUMNS. Other columns
are added to extra_info. A line of results.jsonl, scores.jsonl or rollouts/ is read as the row that it is about. Values
keep their types. Only `data_source` selects the reward function. `reward_model.style`
and `ability` are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

from alphaapollo.data.chats import RowContext, read_chat_text, shorten_repr
from alphaapollo.data.files import DataRow, convert_rows, to_file_list
from alphaapollo.data.findings import READ_AS_TRUTH, TRUTH_COLUMNS, DataFinding
from alphaapollo.data.formats import LOG_COLUMNS, PROMPT_FORMATS, read_rows_in_known_format
from alphaapollo.data.image_messages import IMAGES, ImageReader
from alphaapollo.data.images import collect_images
from alphaapollo.data.rendering import Renderer
from alphaapollo.types import JsonObject, Message, Prompt
from alphaapollo.utils.literals import drop_none, read_literal

READ_COLUMNS = (IMAGES, "data_source", "reward_model", "extra_info", "env_kwargs", "metadata", "ability")
BATCH = 4096  # texts that are tokenized at a time
Truncation = Literal["error", "left", "right", "drop"]


def load_prompts(
    files: str | Sequence[str],
    prompt_key: str,
    allow_image_urls: bool = False,
    renderer: Renderer | None = None,
    findings: list[DataFinding] | None = None,
    system_prompt: str = "",
    ground_truth_key: str = "",
) -> list[Prompt]:
    """Load the prompts of data files, in order. `Prompt.id` is the index of the row over all files. Unread content is
    added to `findings`. Raises ValueError for invalid files, rows or images, or a mix of chats and texts."""
    prompts: list[Prompt] = []
    for file, path in enumerate(to_file_list(files)):
        names = {"prompt": prompt_key}
        rows, unread = read_rows_in_known_format(path, [(prompt_key,)], PROMPT_FORMATS, names, renderer=renderer)
        if findings is not None:
            findings += [item for item in unread if not (ground_truth_key and item.effect == READ_AS_TRUTH)]
        if ground_truth_key and not any(ground_truth_key in row for row in rows):
            columns = ", ".join(rows[0]) if len(rows) else "none"
            raise ValueError(f"{path} has no column data.ground_truth_key={ground_truth_key}. Columns: {columns}.")
        reader, is_json = ImageReader(rows.source.folder, allow_image_urls), ".json" in rows.source.files[0].name
        convert = partial(
            _convert_row_to_prompt,
            prompt_key=prompt_key,
            ground_truth_key=ground_truth_key,
            system_prompt=system_prompt,
            is_json=is_json,
            reader=reader,
        )
        converted_rows = convert_rows(path, rows, convert)
        prompts += [
            replace(prompt, id=number, file=file, location=location)
            for number, (prompt, location) in enumerate(zip(converted_rows, rows.locations, strict=True), len(prompts))
        ]
    others = [prompt for prompt in prompts if isinstance(prompt.content, str) != isinstance(prompts[0].content, str)]
    if others:
        kind, kind_of_first = ("text", "chat") if isinstance(others[0].content, str) else ("chat", "text")
        raise ValueError(
            f"{len(others)} of {len(prompts)} prompts, the first in {others[0].location}: {prompt_key!r} is a {kind}, "
            f"but the first prompt is a {kind_of_first}. Use chats or texts, not both."
        )
    return prompts


def _convert_row_to_prompt(
    row: DataRow, prompt_key: str, ground_truth_key: str, system_prompt: str, is_json: bool, reader: ImageReader
) -> Prompt:
    if not is_json:  # parquet adds the keys of all rows to each row, with the value None
        row = {name: value if name == prompt_key else drop_none(value) for name, value in row.items()}
    if {*LOG_COLUMNS} <= row.keys():
        row = _read_logged_row(row, prompt_key)
    context = RowContext.from_row(row, reader, system_prompt)
    columns = ("reward_model", "extra_info", "env_kwargs")
    reward_model, extra_info, env_kwargs = (_read_struct_column(row, column) for column in columns)
    if row.get("metadata"):
        metadata = row["metadata"]
        parsed = read_literal(metadata) if isinstance(metadata, str) else None
        extra_info = {**extra_info, "metadata": metadata if parsed is None else parsed}
    known = {prompt_key, *READ_COLUMNS}
    extra_info = {key: value for key, value in row.items() if key not in known and value is not None} | extra_info
    truths = [section.get("ground_truth") for section in (reward_model, extra_info, env_kwargs, row)]
    answer = row.get("answer")
    truths.append(answer.rsplit("####")[-1].strip() if isinstance(answer, str) else answer)  # GSM8K: "... #### 14"
    truths += map(row.get, TRUTH_COLUMNS)
    truths = [row.get(ground_truth_key)] if ground_truth_key else truths
    data_source, dataset = row.get("data_source"), row.get("dataset")
    dataset = dataset[0] if isinstance(dataset, list) and len(dataset) == 1 else dataset
    data_source = dataset if data_source is None and isinstance(dataset, str) else data_source
    if not isinstance(data_source, str | None):
        raise ValueError(f"data_source is {shorten_repr(data_source)}; it must be text. Convert it to text.")
    return Prompt(
        id=0,
        data_source=data_source or "",
        content=_read_prompt_content(row, prompt_key, context),
        ground_truth=next((truth for truth in truths if truth is not None), None),
        extra_info=extra_info,
        env_kwargs=env_kwargs,
        template_arguments=context.template_arguments,
    )


def _read_logged_row(row: DataRow, prompt_key: str) -> DataRow:
    """Return the data row of a logged sample (runs/rollout_log.py), without what was logged about the sample."""
    extra_info, prompt = _read_struct_column(row, "extra_info"), row.get("row_prompt") or row.get(prompt_key)
    columns = {name: extra_info.get(name) for name in ("tools", "chat_template_kwargs", "enable_thinking")}
    columns |= {name: row.get(name) for name in ("data_source", "extra_info", "env_kwargs")}
    return {**columns, prompt_key: prompt, "reward_model": {"ground_truth": row.get("ground_truth")}}


def _read_prompt_content(row: DataRow, prompt_key: str, context: RowContext) -> list[Message] | str:
    """Return the chat of a row with its images, or its text. Raises ValueError if it is invalid."""
    value, label = row.get(prompt_key), f"{prompt_key!r}"
    if value is None:
        raise ValueError(f"{label} is missing. Fill it or remove the row.")
    if not isinstance(value, str | list):
        raise ValueError(f"{label} is {shorten_repr(value)}; it must be text or a list of chat messages.")
    value = read_chat_text(value) or value
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{label} is empty. Fill it or remove the row.")
        if not context.needs_chat:
            context.check_has_no_images(prompt_key)
            return value
        value = [Message(role="user", content=value)]
    messages = context.read_chat(value, prompt_key)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{label} ends with an assistant message. Remove it; the model generates the answer.")
    return messages


def _read_struct_column(row: DataRow, column: str) -> JsonObject:
    value = row.get(column)
    if isinstance(value, str):
        value = read_literal(value) or (value if value.strip() else None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{column!r} is {shorten_repr(value)}; it must be a struct (dict).")
    return {name: part for name, part in value.items() if part is not None}


def list_text_notices(texts: Sequence[str], renderer: Renderer) -> list[str]:
    """Return notices about text prompts that a model may not continue as users expect."""
    tokenizer, notices = renderer.tokenizer, list[str]()
    eos = tokenizer.eos_token or ""
    if eos and (num_ended := sum(text.rstrip().endswith(eos) for text in texts)):
        notices.append(
            f"{num_ended} prompts end with {eos}, so that there is nothing to continue. Remove it from the data."
        )
    if texts and tokenizer.chat_template and not any(token in texts[0] for token in tokenizer.added_tokens_encoder):
        notices.append(
            f"{len(texts)} prompts are texts, so the chat template of the tokenizer is not applied. For chats, make "
            'each prompt a list of messages: [{"role": "user", "content": TEXT}].'
        )
    return notices


def apply_length_limit(
    prompts: Sequence[Prompt], renderer: Renderer, max_prompt_length: int, truncation: Truncation
) -> tuple[list[Prompt], int]:
    """Apply data.max_prompt_length. Returns the remaining prompts, and the number of prompts that are too long. With
    truncation=left or right, `truncate_prompt` truncates these when they are rendered. Raises ValueError like
    check_length_limit."""
    batches = (prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH))
    lengths = [*chain.from_iterable(map(renderer.count_prompt_tokens, batches))]
    has_images = [bool(collect_images(prompt.content)) for prompt in prompts]
    locations = [prompt.location or f"row {prompt.id}" for prompt in prompts]
    num_long = check_length_limit(
        lengths, locations, "prompts", "data.max_prompt_length", max_prompt_length, truncation, has_images
    )
    if truncation != "drop":
        return list(prompts), num_long
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length], num_long


def check_length_limit(
    lengths: Sequence[int],
    locations: Sequence[str],
    plural_noun: str,
    key: str,
    limit: int,
    truncation: Truncation,
    has_images: Sequence[bool] = (),
) -> int:
    """Count the lengths over `limit`, the value of the config key `key`. Raises ValueError if some are too long and
    truncation=error, an item with an image would be truncated, or all are too long and truncation=drop."""
    with_images = [index for index, has_image in enumerate(has_images) if has_image]
    if with_images and truncation != "drop":
        rows, row_lengths = [locations[index] for index in with_images], [lengths[index] for index in with_images]
        check_length_limit(row_lengths, rows, f"{plural_noun} with images", key, limit, "error")
    long = [index for index, length in enumerate(lengths) if length > limit]
    if long and truncation == "error":
        choices = "drop, left or right" if plural_noun in ("prompts", "examples") else "drop"
        if "images" in plural_noun:
            choices += " (images are not cut)"
        raise ValueError(
            f"{len(long)} of {len(lengths)} {plural_noun} are longer than {key}={limit}. The first is "
            f"{locations[long[0]]} with {lengths[long[0]]} tokens; the longest has {max(lengths)}. Raise {key}, or "
            f"set data.truncation to {choices}."
        )
    if long and truncation == "drop" and len(long) == len(lengths):
        raise ValueError(
            f"all {len(lengths)} {plural_noun} are longer than {key}={limit} (the shortest has {min(lengths)} tokens), "
            f"so data.truncation=drop leaves none. Raise {key}."
        )
    return len(long)


def truncate_prompt(token_ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """Truncate a prompt to max_length tokens. truncation=left removes tokens at its start, right at its end."""
    if len(token_ids) <= max_length:
        return token_ids
    assert truncation in ("left", "right"), "check_length_limit rejects or drops such a prompt"
    return token_ids[-max_length:] if truncation == "left" else token_ids[:max_length]
