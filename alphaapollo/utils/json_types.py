"""Types of parsed JSON and chat messages, and conversions to JSON. Imported everywhere, so it imports nothing large."""

from __future__ import annotations

import math
from typing import Any, NotRequired, TypedDict

Json = Any  # parsed JSON value, or a value like it: YAML, a cell of a data file
JsonObject = dict[str, Any]  # parsed JSON object, or a value like it: YAML, a tool schema, the arguments of a tool call


def finite_or_none(value: float) -> float | None:
    """Return the value as a float, or None for NaN and infinity."""
    value = float(value)
    return value if math.isfinite(value) else None


def to_json_value(value: object) -> Json:
    """Convert NumPy arrays and numbers to JSON types, and all other objects to text. Bytes become `12 bytes`."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value.tolist() if hasattr(value, "tolist") else str(value)


EncodedImage = bytes | str
"""Encoded image (PNG, JPEG, ...), or the path of an image file."""

IMAGE_MARK = "<image>"
"""Position of an image in the content of a message with `images`."""


class FunctionCall(TypedDict):
    """Name and arguments of a tool call."""

    name: str
    arguments: JsonObject


class ToolCall(TypedDict):
    """Tool call of an assistant message, as in OpenAI's API but with arguments as a dict."""

    id: str
    type: str
    function: FunctionCall


class Message(TypedDict):
    """Chat message, e.g. `{"role": "user", "content": "2+2=?"}`.

    The content of a message with images has an IMAGE_MARK for each image, in order.
    """

    role: str
    content: str
    name: NotRequired[str]  # role tool: name of the tool
    tool_call_id: NotRequired[str]  # role tool: id of the call
    tool_calls: NotRequired[list[ToolCall]]  # role assistant: calls after the content
    reasoning_content: NotRequired[str]  # role assistant: thoughts before the content
    thinking: NotRequired[str]  # the same thoughts under the name that gpt-oss reads
    train: NotRequired[bool]  # role assistant: False if fine-tuning does not train on the message
    images: NotRequired[list[Any]]  # of type Image, which msgspec cannot decode


ChatMessage = Message | JsonObject
"""Message, or one with more keys for the chat template, e.g. `tool_calls`."""
