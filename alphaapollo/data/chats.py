"""Read chats from data rows: roles, tool calls, thoughts and weights of messages in the forms that data sets have.

{"from": "gpt", "value": "4"}                              ->  {"role": "assistant", "content": "4"}
{"from": "function_call", "value": '{"name": "f", ...}'}   ->  {"role": "assistant", "tool_calls": [...]}
{"role": "assistant", "content": "4", "weight": 0}         ->  {"role": "assistant", "content": "4", "train": False}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

from alphaapollo.data.image_messages import LOCAL_IMAGES, ImageReader, convert_parts, place_images, read_image_column
from alphaapollo.types import IMAGE_MARK, ChatMessage, EncodedImage, Json, JsonObject, Message, ToolCall
from alphaapollo.utils.literals import drop_none, read_literal
from alphaapollo.utils.thoughts import find_thoughts

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "ai", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "tool_result"), "tool"),
}
"""{name of a role in lower case: role}. Other names are given to the chat template as they are."""
MESSAGE_CONTENT = {"content", "value", "tool_calls", "function_call"}  # a message has at least one of these keys
CALL_ROLES = ("function_call", "tool_call")  # the content of such a message is one call, or a list of calls
CONTEXT_COLUMNS = ("images", "image", "system", "history", "tools", "chat_template_kwargs", "enable_thinking")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
WEIGHT_KEYS = ("weight", "train", "training", "loss", "loss_scale", "loss_mask", "step_loss_mask", "trainable")
"""Weights of a message in OpenAI's data, axolotl, ShareGPT, ms-swift, verl and slime: 0 or 1."""
MASK_KEYS = ("mask", "masked")  # torchtune's opposite of a weight: true excludes the message
SPAN_KEYS = ("train_detail", "training_detail")  # axolotl's weights of parts of a message
MESSAGE_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name", "images"}
MESSAGE_KEYS |= {*THOUGHT_KEYS, *WEIGHT_KEYS, *MASK_KEYS, *SPAN_KEYS}  # keys of messages that are read


def read_chat(value: Sequence[object], column: str, reader: ImageReader = LOCAL_IMAGES) -> list[Message]:
    """Convert a list of {role, content} or {from, value} in `column` of a data file to messages.

    Calls without an id get one. A tool result without an id belongs to the first call that has no result yet. A result
    with an unknown id belongs to the only call without a result; ValueError is raised if there are several such calls.
    Raises ValueError also if a message is malformed, or if all contents are empty.
    """
    messages: list[Message] = []
    unanswered: dict[str, ToolCall] = {}  # calls without a result, by id
    for raw_message in value:
        try:
            message, is_call = _read_message(raw_message, reader)
        except ValueError as error:
            raise ValueError(f"{column} has an invalid message: {error}") from error
        if is_call and messages and messages[-1]["role"] == "assistant":  # ShareGPT: parallel calls follow each other
            earlier = messages.pop()
            message = {**earlier, "tool_calls": [*earlier.get("tool_calls", []), *message["tool_calls"]]}
        if message["role"] == "assistant":
            for number, call in enumerate(message.get("tool_calls", [])):
                call["id"] = call["id"] or f"call{number:05}"  # nine letters and digits, as some templates require
            unanswered = {call["id"]: call for call in message.get("tool_calls", [])}
        elif message["role"] == "tool" and unanswered:
            call = unanswered.pop(_find_id_of_call(message, [*unanswered], column))
            name = call["function"]["name"]  # unless the message has a name
            message = cast(Message, {"name": name, **message, "tool_call_id": call["id"]})
        messages.append(message)
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise ValueError(f"{column} is empty. Fill it or remove the row.")
    return messages


def _find_id_of_call(result: Message, unanswered: list[str], column: str) -> str:
    """Return the id of the call that a tool result answers. unanswered: ids of the calls without a result, in order."""
    given = str(result.get("tool_call_id", ""))
    if given and given not in unanswered and len(unanswered) > 1:
        raise ValueError(
            f"{column} has a tool result with tool_call_id={given!r}, but the calls before it that have no result have "
            f"the ids {', '.join(unanswered)}. Use the id of its call, or remove tool_call_id."
        )
    return given if given in unanswered else unanswered[0]


def read_chat_text(text: object) -> list[object] | None:
    """Parse a text that contains a message or a list of messages, as JSON or in Python's notation. None for another
    value, and if all roles are unknown: `{"from": "Oslo", "value": 2}` may be an answer in JSON."""
    value: Json = read_literal(text) if isinstance(text, str) and ("role" in text or "from" in text) else None
    messages = [value] if isinstance(value, dict) else value or []
    if not all(isinstance(message, dict) and MESSAGE_CONTENT & message.keys() for message in messages):
        return None
    roles = (str(message.get("role", message.get("from"))).strip().lower() for message in messages)
    return messages if any(role in ROLES for role in roles) else None


def read_context(row: Mapping[str, Json]) -> list[Message]:
    """Return the messages of the columns `system` and `history` ([[question, answer], ...]), which precede a chat.
    Raises ValueError if a column is malformed."""
    system, history = row.get("system"), _parse(row.get("history")) or []
    if not isinstance(system, str | None):
        raise ValueError(f"'system' is {shorten_repr(system)}; it must be text.")
    if not isinstance(history, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise ValueError(f"'history' is {shorten_repr(history)}; it must be a list of [question, answer] pairs.")
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
    first = [Message(role="system", content=system)] if system and system.strip() else []
    return [*first, *(read_chat(turns, "'history'") if turns else [])]


def join_context(context: list[Message], chat: list[Message]) -> list[Message]:
    """Put the messages of `read_context` before a chat. Raises ValueError if both have a different system message."""
    systems = [message["content"] for message in (*context[:1], *chat[:1]) if message["role"] == "system"]
    if len({*systems}) > 1:
        raise ValueError(f"the column 'system' and the chat have different system messages, {systems}. Remove one.")
    return [*context, *(chat[1:] if len(systems) == 2 else chat)]


def add_system_message(chat: list[Message], system_prompt: str) -> list[Message]:
    """Put a system message before a chat without one, if `system_prompt` is not empty."""
    if not system_prompt or chat[0]["role"] == "system":
        return chat
    return [Message(role="system", content=system_prompt), *chat]


def read_template_arguments(row: Mapping[str, Json]) -> JsonObject:
    """Return the variables for the chat template in the columns `chat_template_kwargs`, `tools` and `enable_thinking`.
    Raises ValueError if a column is malformed."""
    arguments = _parse(row.get("chat_template_kwargs")) or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"'chat_template_kwargs' is {shorten_repr(arguments)}; it must be a dict.")
    arguments = drop_none({"enable_thinking": row.get("enable_thinking"), **arguments})
    tools = _parse(row.get("tools")) or []
    tools = tools if isinstance(tools, list) else [tools]
    schemas = []
    for tool in map(_parse, tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool).get("name"), str):
            raise ValueError(f"'tools' has {shorten_repr(tool)}; it must be {{type, function: {{name, parameters}}}}.")
        schemas.append(drop_none(tool if "function" in tool else {"type": "function", "function": tool}))
    return {**arguments, **({"tools": schemas} if schemas else {})}


def read_thoughts(row: Mapping[str, Json]) -> str:
    """Return the first text under THOUGHT_KEYS that is not blank; "" if all are. Raises ValueError for another type."""
    for key in THOUGHT_KEYS:
        if (thoughts := row.get(key)) is not None:
            if not isinstance(thoughts, str):
                raise ValueError(f"{key!r} is {shorten_repr(thoughts)}; it must be text.")
            if thoughts.strip():
                return thoughts
    return ""


def add_thoughts(message: Message, thoughts: str) -> Message:
    """Return an assistant message with thoughts, under the names that chat templates read."""
    return {**message, "reasoning_content": thoughts, "thinking": thoughts} if thoughts else message


def read_inline_thoughts(message: Message) -> str:
    """Return the first thought in an assistant's content: the text between two marks, or before a closing mark."""
    thoughts = find_thoughts(message["content"]) if message["role"] == "assistant" else []
    return thoughts[0].content.strip("\n") if thoughts and thoughts[0].is_closed else ""


def drop_thoughts(message: Message) -> Message:
    """Return a message without the thoughts of the assistant."""
    if message["role"] != "assistant":
        return message
    others = {key: part for key, part in message.items() if key not in THOUGHT_KEYS}
    return cast(Message, {**others, "content": split_answer(message["content"]).lstrip("\n")})


def split_answer(text: str) -> str:
    """Return what follows the last closed thought of a text."""
    ends = [thought.end for thought in find_thoughts(text) if thought.is_closed]
    return text[max(ends, default=0) :]


def count_equal_items(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def shorten_repr(value: object) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_message(value: object, reader: ImageReader) -> tuple[Message, bool]:
    """Convert a message. Also returns whether its role is that of a call (CALL_ROLES)."""
    raw = {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else {}
    name, content = raw.pop("role", raw.pop("from", None)), raw.pop("content", raw.pop("value", None))
    if not isinstance(name, str):
        raise ValueError(f"{shorten_repr(value)}; it must be a {{role, content}} dict.")
    role, is_call = ROLES.get(name.strip().lower(), name), name.strip().lower() in CALL_ROLES
    is_trained = _read_weight(raw)
    calls = _read_calls(content if is_call else raw.pop("tool_calls", raw.pop("function_call", None)))
    if is_call or (content is None and calls):
        content = ""
    elif isinstance(content, dict) and role == "tool":
        content = json.dumps(drop_none(content), ensure_ascii=False)
    elif not isinstance(content, str | list):
        raise ValueError(f"{shorten_repr(value)}; its content must be text or parts.")
    thoughts = read_thoughts(raw)
    if isinstance(content, list):
        kinds = ("thinking", "reasoning")  # the text of such a part is under this key or `text`
        thought_parts = [part for part in content if isinstance(part, dict) and part.get("type") in kinds]
        thoughts = thoughts or "".join(str(part.get(part["type"]) or part.get("text") or "") for part in thought_parts)
        content = [part for part in content if part not in thought_parts]
    rest = {key: part for key, part in raw.items() if key not in THOUGHT_KEYS}
    message = convert_parts({"role": role, "content": content, **rest}, reader)
    if role == "assistant":
        message = add_thoughts({**message, "tool_calls": calls} if calls else message, thoughts)
        message = message if is_trained else {**message, "train": False}
    return message, is_call


def _read_weight(raw: JsonObject) -> bool:
    """Remove the weights from a message and return whether it is trained on. Raises ValueError for other values than 0
    and 1, and for weights of parts of a message."""
    weights = {key: raw.pop(key) for key in (*WEIGHT_KEYS, *MASK_KEYS) if key in raw}
    for key, weight in weights.items():
        if weight not in (0, 1) or (key in MASK_KEYS and not isinstance(weight, bool)):  # `mask: 1` is ambiguous
            raise ValueError(f"{key}={shorten_repr(weight)} is not supported. Use weight: 1 or 0.")
    if spans := [key for key in SPAN_KEYS if raw.pop(key, None)]:
        raise ValueError(f"{', '.join(spans)} is not supported. Set `train: false` to exclude the complete message.")
    return all((not weight) if key in MASK_KEYS else weight for key, weight in weights.items())


def _read_calls(value: object) -> list[ToolCall]:
    """Convert calls, or the text of calls, to OpenAI's format. Ids that are missing are empty."""
    value = (_parse(value) if isinstance(value, str) else drop_none(value)) or []
    calls = []
    raw_calls = value if isinstance(value, list) else [value]
    for raw_call in raw_calls:
        call = _parse(raw_call)
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = _parse(function.get("arguments", function.get("parameters"))) or {}
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError(
                f"the tool call {shorten_repr(raw_call)}; it must be {{name, arguments}} with a dict or its JSON."
            )
        named = {"name": function["name"], "arguments": arguments}
        calls.append(cast(ToolCall, {"id": str(call.get("id", "")), "type": "function", "function": named}))
    return calls


def _parse(value: object) -> Json:
    """Return the value that a text writes in JSON or Python notation; other values unchanged."""
    if not isinstance(value, str):
        return value
    parsed = read_literal(value)
    return parsed if parsed is not None else value.strip()


@dataclass(frozen=True)
class RowContext:
    """Messages, images and template variables that the CONTEXT_COLUMNS of a data row add to its chat."""

    template_arguments: JsonObject
    messages: list[Message]  # system message and earlier turns
    images: list[EncodedImage] | None  # of the column `images`
    reader: ImageReader
    system_prompt: str = ""  # data.system_prompt

    @classmethod
    def from_row(cls, row: Mapping[str, Json], reader: ImageReader, system_prompt: str = "") -> RowContext:
        """Read the columns. Raises ValueError if one is malformed."""
        images = read_image_column(row, reader)
        return cls(read_template_arguments(row), read_context(row), images, reader, system_prompt)

    @property
    def needs_chat(self) -> bool:
        """Whether the prompt must be a chat, so that a text prompt becomes the message of a user."""
        return bool(self.messages or self.system_prompt or "tools" in self.template_arguments)

    def read_chat(self, value: Sequence[object], column: str) -> list[Message]:
        """Return the context's messages and the chat in a column, with images. Raises ValueError if it is malformed."""
        chat = join_context(self.messages, place_images(read_chat(value, repr(column), self.reader), self.images))
        return add_system_message(chat, self.system_prompt)

    def check_has_no_images(self, column: str) -> None:
        """Raise ValueError if there are images, because the prompt in `column` is a text."""
        if self.images:
            example = [{"role": "user", "content": f"{IMAGE_MARK} ..."}]
            raise ValueError(f"{column!r} is a text, but the row has images. Use a chat, e.g. {example}.")


def reads_arguments_as_text(render: Callable[[Sequence[ChatMessage], bool], str]) -> bool:
    """Return whether a chat template shows tool calls only if arguments are JSON text and an empty content is None, as
    the templates of DeepSeek V3 and R1 do. render: see MarkFinder."""
    name = "name_of_a_tool"
    calls = [{"id": "call00000", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}]
    call: ChatMessage = {"role": "assistant", "content": "", "tool_calls": calls}

    def is_shown(message: ChatMessage) -> bool:
        try:
            return name in render([Message(role="user", content="?"), message], False)
        except ValueError:
            return False

    return not is_shown(call) and is_shown(write_arguments_as_text(call))


def write_arguments_as_text(message: ChatMessage) -> ChatMessage:
    """Return a message whose calls have JSON text as arguments, and None as content if it is empty."""
    if not (calls := message.get("tool_calls")):
        return message
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    functions = [{**call["function"], "arguments": text} for call, text in zip(calls, texts, strict=True)]
    new_calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return {**message, "content": message["content"] or None, "tool_calls": new_calls}
