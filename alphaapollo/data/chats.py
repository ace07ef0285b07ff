"""Read chats from data rows."""

from __future__ import annotations

from alphaapollo.data.image_messages import LOCAL_PICTURES, PictureReader, convert_parts
from alphaapollo.types import Message


def read_chat(value: list[object], column: str, reader: PictureReader = LOCAL_PICTURES) -> list[Message]:
    """Convert a list of {role, content} from a data file to messages. Drops keys with the value None.

    `RowPictures.place` adds the pictures of the row. Raises ValueError if a message is malformed or all contents are
    empty. The error text starts with `column`.
    """
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{column} has the message {shorten_repr(message)}; it must be a {{role, content}} dict.")
        if not isinstance(message.get("content"), str | list):
            raise ValueError(f"{column} has the message {shorten_repr(message)}; its content must be text or parts.")
        try:
            messages.append(convert_parts({key: part for key, part in message.items() if part is not None}, reader))
        except ValueError as error:
            raise ValueError(f"{column} has an invalid message: {error}") from error
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{column} is empty. Fill it or remove the row.")
    return messages


def shorten_repr(value: object) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
