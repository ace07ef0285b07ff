"""Find what a run does not read in its data, or reads in its own way: one pass over the rows of each file.

The findings are printed with the plan, and are in plan.json and on the viewer's page of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alphaapollo.data.chats import CONTEXT_COLUMNS, MESSAGE_KEYS, ROLES, read_chat_text, read_template_arguments
from alphaapollo.types import IMAGE_MARK, JsonObject
from alphaapollo.utils.literals import read_literal

if TYPE_CHECKING:
    from alphaapollo.data.rendering import Renderer

TRUTH_COLUMNS = ("expected_answer", "final_answer", "golden_answers", "answers", "solution", "Answer", "label")
"""Columns that may have the ground truth if there is neither `ground_truth` nor `answer`. The first one counts."""
VERL_COLUMNS = ("ground_truth", "answer", "reward_model", "extra_info", "env_kwargs")  # may have a ground truth, too
PARSED_COLUMNS = {*CONTEXT_COLUMNS, *TRUTH_COLUMNS, *VERL_COLUMNS, "metadata", "objects", "videos", "audios"}
EFFECTS = {
    "the column": "not read",
    "no other ground truth than in the column": "read as the ground truth",
    "no data_source beside the column": "read as data_source",
    "chats written as text in the column": "read as chats",
    "JSON written as text in the column": "not parsed",
    "an answer before the first question in the column": "part of the prompt, not trained on",
    "a BOS token at the start of the column": "removed, because the tokenizer adds it",
    f"{IMAGE_MARK} without a picture in the column": "shown to the model as text",
    "the key of messages": "neither read nor shown by the chat template",
    "the variable": "the chat template does not read it",
}
"""{content: what happens with it}. The content is followed by the name of a column, key or variable."""
COLUMN, TRUTH, SOURCE, CHAT, JSON_TEXT, FIRST, BOS, MARK, KEY, VARIABLE = EFFECTS


@dataclass(frozen=True)
class DataFinding:
    """What rows of the data have, and what the run does with it."""

    place: str  # file or data source
    content: str  # e.g. "the column 'id'"
    effect: str  # e.g. "not read"
    rows: int  # rows that have it
    total: int  # rows that were searched

    def describe(self) -> str:
        """Return a line for the console."""
        return f"{self.place}: {self.content}: {self.effect} ({self.rows:,} of {self.total:,} rows)."


def find_unread_content(
    path: str, rows: Sequence[JsonObject], read: Collection[str], context: Collection[str] | None, renderer: Any
) -> list[DataFinding]:
    """Find what a run ignores in the rows of a file: columns, keys of messages, variables for the chat template.

    read: columns with prompts, chats or answers. context: columns that are also read; None if all are. renderer: the
    model's, which knows what the chat template shows; None if the command has no model.
    """
    counts, values = Counter[tuple[str, str]](), dict[tuple[str, str], Any]()
    for row in rows:
        found = dict(_list_contents(row, read, context, renderer.added_bos if renderer else ""))
        counts.update(found.keys())
        values |= {content: value for content, value in found.items() if value or content not in values}
    return [
        DataFinding(path, f"{content} {name.split(':')[-1]!r}", EFFECTS[content], count, len(rows))
        for (content, name), count in counts.items()
        if _is_ignored(content, name, values[content, name], renderer)
    ]


def _list_contents(
    row: JsonObject, read: Collection[str], context: Collection[str] | None, bos: str
) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield ((content, name), value) for what a run may ignore in a row. The name of a key begins with a role."""
    for column, value in row.items():
        if value is None or column == "data_source":
            continue
        if column not in read:
            if context is not None and column not in context:
                yield (COLUMN, column), True
            elif isinstance(value, str) and value.startswith(("[", "{")) and column not in PARSED_COLUMNS:
                yield (JSON_TEXT, column), value
            continue
        if bos and isinstance(value, str) and value.startswith(bos):
            yield (BOS, column), True
        if not row.keys() & {"image", "images"} and IMAGE_MARK in str(value):
            yield (MARK, column), True
        if chat := read_chat_text(value):
            yield (CHAT, column), True
        messages = [one for one in chat or value if isinstance(one, dict)] if chat or isinstance(value, list) else []
        roles = [str(one.get("role", one.get("from"))).strip() for one in messages]
        roles = [ROLES.get(role.lower(), role) for role in roles]
        if roles[:1] == ["assistant"] and column.startswith(("messages", "conversation")):
            yield (FIRST, column), True
        for role, message in zip(roles, messages, strict=True):
            unknown = (key for key in message.keys() - MESSAGE_KEYS if message[key] is not None)
            yield from (((KEY, f"{role}:{key}"), message[key]) for key in unknown)
    if context is None:  # a row for RL
        truth = next((name for name in (*VERL_COLUMNS, *TRUTH_COLUMNS) if row.get(name) is not None), "")
        yield from [((TRUTH, truth), True)] * (truth in TRUTH_COLUMNS)
        yield from [((SOURCE, "dataset"), True)] * (row.get("dataset") is not None and row.get("data_source") is None)
    with suppress(ValueError):  # the row is refused
        arguments = read_template_arguments(row) if row.keys() & {*CONTEXT_COLUMNS} else {}
        yield from (((VARIABLE, name), True) for name in arguments)


def _is_ignored(content: str, name: str, value: Any, renderer: Renderer | None) -> bool:
    """Whether the run ignores a content of which a row has `value`."""
    if content == JSON_TEXT:
        return read_literal(value) is not None
    if renderer is None or content not in (KEY, VARIABLE):
        return content not in (KEY, VARIABLE)
    if content == VARIABLE:
        return not renderer.template_reads(name)
    role, _, key = name.partition(":")
    chat: list[Any] = [{"role": "user", "content": "?"}, {"role": role, "content": "?"}][role in ("system", "user") :]
    with suppress(ValueError):  # a template for other chats
        return renderer.render_chat(chat) == renderer.render_chat([*chat[:-1], {**chat[-1], key: value}])
    return False
