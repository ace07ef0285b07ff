"""Find content of the data that a run ignores or interprets, in one pass over the rows of each file.

The findings are printed with the plan, and are in plan.json and on the viewer's page of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alphaapollo.data.chats import CONTEXT_COLUMNS, MESSAGE_KEYS, ROLES, read_chat_text, read_template_arguments
from alphaapollo.types import IMAGE_MARK, Json, JsonObject
from alphaapollo.utils.literals import read_literal

if TYPE_CHECKING:
    from alphaapollo.data.rendering import Renderer

TRUTH_COLUMNS = ("expected_answer", "final_answer", "golden_answers", "answers", "solution", "Answer", "label")
"""Columns that may have the ground truth if a row has neither `ground_truth` nor `answer`. The first one counts."""
VERL_COLUMNS = ("ground_truth", "answer", "reward_model", "extra_info", "env_kwargs")  # may have a ground truth, too
PARSED_COLUMNS = {*CONTEXT_COLUMNS, *TRUTH_COLUMNS, *VERL_COLUMNS, "metadata", "objects", "videos", "audios"}
JSON_TEXT, KEY, VARIABLE = "JSON written as text in the column", "the key of messages", "the variable"
READ_AS_TRUTH = "read as the ground truth"  # unless data.ground_truth_key names another column
Content = tuple[str, str, str]  # kind of content, its name, and what happens with it


@dataclass(frozen=True)
class DataFinding:
    """Content that rows of the data have, and what the run does with it."""

    place: str  # file or data source
    content: str  # e.g. "the column 'id'"
    effect: str  # e.g. "not read"
    rows: int  # rows that have it
    total: int  # rows that were searched

    def describe(self) -> str:
        """Return a line for the console."""
        return f"{self.place}: {self.content}: {self.effect} ({self.rows:,} of {self.total:,} rows)."


def find_unread_content(
    path: str, rows: Sequence[JsonObject], columns: Collection[str], context: Collection[str] | None, renderer: Any
) -> list[DataFinding]:
    """Find what a run ignores in the rows of a file: columns, keys of messages, variables for the chat template.

    columns: columns with prompts, chats or answers. context: other columns that are read; None if all are. renderer:
    renderer of the model, to find what its chat template shows; None if the command has no model.
    """
    counts, values = Counter[Content](), dict[Content, Json]()
    for row in rows:
        found = dict(_list_contents(row, columns, context, renderer.added_bos if renderer else ""))
        counts.update(found.keys())
        for content, value in found.items():
            kind, name, _ = content
            if content not in values or (kind == KEY and value[name]):  # a template may hide a false value
                values[content] = value
    return [
        DataFinding(path, f"{kind} {name!r}", effect, count, len(rows))
        for (kind, name, effect), count in counts.items()
        if _is_ignored(kind, name, values[kind, name, effect], renderer)
    ]


def _list_contents(
    row: JsonObject, columns: Collection[str], context: Collection[str] | None, bos: str
) -> Iterator[tuple[Content, Json]]:
    """Yield (content, value) for what a run may ignore in a row. For a key of a message: {"role": ..., key: ...}."""
    for column, value in row.items():
        if value is None or column == "data_source":
            continue
        if column not in columns:
            if context is not None and column not in context:
                yield ("the column", column, "not read"), True
            elif isinstance(value, str) and value.startswith(("[", "{")) and column not in PARSED_COLUMNS:
                yield (JSON_TEXT, column, "not parsed"), value
            continue
        if bos and isinstance(value, str) and value.startswith(bos):
            yield (f"{bos} at the start of the column", column, "removed, because the tokenizer adds it"), True
        if not row.keys() & {"image", "images"} and IMAGE_MARK in str(value):
            yield (f"{IMAGE_MARK} without an image in the column", column, "shown to the model as text"), True
        if chat := read_chat_text(value):
            yield ("chats written as text in the column", column, "read as chats"), True
        items = chat or (value if isinstance(value, list) else [])
        messages = [item for item in items if isinstance(item, dict)]
        names = (str(message.get("role", message.get("from"))).strip() for message in messages)
        roles = [ROLES.get(name.lower(), name) for name in names]
        if roles[:1] == ["assistant"] and column.startswith(("messages", "conversation")):
            yield ("an answer before the first question in the column", column, "not trained on"), True
        for role, message in zip(roles, messages, strict=True):
            unknown = (key for key in message if key not in MESSAGE_KEYS and message[key] is not None)
            yield from (((KEY, key, "neither read nor shown"), {"role": role, key: message[key]}) for key in unknown)
    if context is None:  # a row for RL
        truth = next((name for name in (*VERL_COLUMNS, *TRUTH_COLUMNS) if row.get(name) is not None), "")
        if truth in TRUTH_COLUMNS:
            yield ("the column", truth, READ_AS_TRUTH), True
        if row.get("dataset") is not None and row.get("data_source") is None:
            yield ("the column", "dataset", "read as data_source"), True
    with suppress(ValueError):  # the row is refused
        arguments = read_template_arguments(row) if row.keys() & {*CONTEXT_COLUMNS} else {}
        yield from (((VARIABLE, name, "the chat template does not read it"), True) for name in arguments)


def _is_ignored(kind: str, name: str, value: Json, renderer: Renderer | None) -> bool:
    """Return whether the run ignores content of this kind and name. value: an example from a row."""
    if kind == JSON_TEXT:
        return read_literal(value) is not None
    if kind not in (KEY, VARIABLE):
        return True
    if renderer is None:
        return False
    if kind == VARIABLE:
        return not renderer.template_reads(name)
    bare = {"role": value["role"], "content": "?"}
    before: list[JsonObject] = [] if value["role"] in ("system", "user") else [{"role": "user", "content": "?"}]
    with suppress(ValueError):  # the template rejects these chats
        return renderer.render_chat([*before, bare]) == renderer.render_chat([*before, {**bare, **value}])
    return False
