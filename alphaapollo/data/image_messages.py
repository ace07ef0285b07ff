"""Place images in the messages of data rows and environments.

    row {"prompt": [{"content": "<image> How many?"}], "images": [{"bytes": PNG}]}    marks, and a column of images
    message {"content": [{"type": "image", "image": PNG}, {"type": "text", "text": " How many?"}]}    a list of parts
      -> message {"content": "<image> How many?", "images": [PNG]}

An image is bytes, a path, a `data:` URL, a dict with one of IMAGE_KEYS, a PIL image, a uint8 array [height, width,
3] or, if allowed, an http(s) URL.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np

from alphaapollo.data.images import collect_images, encode_png, make_count_error, open_image
from alphaapollo.types import IMAGE_MARK, ChatMessage, EncodedImage, JsonObject, Message
from alphaapollo.utils.literals import read_literal

IMAGES = "images"  # key of a message, and column of a data row
IMAGE_PART = "image_pil"  # type of a part of an agent's message; the part's `uuid` is the digest of an image
IMAGE_KEYS = ("bytes", "image", "image_url", "url", "path")  # the first one that is not None counts
DOWNLOAD_TIMEOUT = 30.0  # seconds that a server may take to send anything
MAX_DOWNLOAD = 32 << 20  # bytes
DOWNLOADS_KEPT = 4096  # downloaded images that stay in memory, because several rows may have the same one


@dataclass(frozen=True)
class ImageReader:
    """Reader of images in any of the forms above. Relative paths start at `folder`."""

    folder: Path = Path()
    allow_urls: bool | None = None  # download http(s) URLs; None: data.allow_image_urls does not apply

    def read(self, value: object) -> EncodedImage:
        """Return the bytes or the absolute path of an image. Raises ValueError if its header is unreadable."""
        encoded_image = self._find(value)
        with open_image(encoded_image):
            return encoded_image

    def _find(self, value: object) -> EncodedImage:
        from PIL import Image

        if isinstance(value, Mapping):
            return self._find(next((value[key] for key in IMAGE_KEYS if value.get(key) is not None), None))
        if isinstance(value, bytes):
            return value
        if isinstance(value, np.ndarray):  # e.g. a frame of a game
            if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
                form = f"{value.dtype} array of shape {value.shape}"
                raise ValueError(f"an image is a {form}. Use a uint8 array [height, width, 3].")
            value = Image.fromarray(value)
        if isinstance(value, Image.Image):
            return encode_png(value)
        if not isinstance(value, str | Path) or not str(value):
            raise ValueError(f"an image is {value!r:.80}. Use bytes, a path, a data: URL or a dict with one of them.")
        text = str(value)
        if text.startswith("data:"):
            return _read_url(text)
        if text.startswith(("http://", "https://")):
            if not self.allow_urls:
                fix = "Return its bytes" if self.allow_urls is None else "Set data.allow_image_urls=true to download it"
                raise ValueError(f"an image is the address {text:.80}. {fix}.")
            return _download(text)
        return str((self.folder / Path(text).expanduser()).absolute())


LOCAL_IMAGES = ImageReader()  # paths start at the working folder, no downloads


def read_image_column(row: Mapping[str, object], reader: ImageReader) -> list[EncodedImage] | None:
    """Read the column `images` of a data row; None if there is no such column. Raises ValueError if an image cannot be
    read, or if the row has boxes, videos or audio."""
    _check_has_only_images(row)
    if IMAGES not in row and row.get("image") is not None:  # LLaVA: the image of the only mark
        texts = (value for column, value in row.items() if column != "image")
        row = {IMAGES: [row["image"]]} if any(IMAGE_MARK in str(value) for value in texts) else row
    if IMAGES not in row:
        return None
    values = row[IMAGES] or []
    if not isinstance(values, list):
        raise ValueError(f"{IMAGES!r} is a {type(values).__name__}; it must be a list of images.")
    return [reader.read(value) for value in values]


def _check_has_only_images(row: Mapping[str, object]) -> None:
    """Raise ValueError if a row has boxes, videos or audio in the columns of ms-swift."""
    values = {name: row.get(name) for name in ("objects", "videos", "audios")}
    values = {name: read_literal(value) if isinstance(value, str) else value for name, value in values.items()}
    objects = values["objects"]
    if isinstance(objects, dict) and objects.keys() & {"bbox", "ref"}:
        raise ValueError(
            f"'objects' is {objects!r:.60}; boxes are not filled into a text, because each model writes them in its "
            "own way. Write them into the messages as your model expects, and remove the column."
        )
    if name := next((name for name in ("videos", "audios") if isinstance(values[name], list) and values[name]), ""):
        raise ValueError(f"{name!r} is {values[name]!r:.60}; only images are supported. Remove the column, or the row.")


def place_images(messages: Sequence[Message], column: Sequence[EncodedImage] | None = None) -> list[Message]:
    """Distribute the images of a row's column to the marks of a chat from `convert_parts`, in order. Without a column,
    `<image>` in a text has no meaning. Raises ValueError if the numbers of marks and images differ, or an assistant
    message has images."""
    slots = [_list_slots(message) for message in messages]
    if column is None and not collect_images(messages):
        return list(messages)
    num_marks, remaining = sum(message_slots.count(None) for message_slots in slots), iter(column or ())
    if num_marks != len(column or ()):
        raise make_count_error("the chat", num_marks, len(column or ()))
    placed = []
    for message, message_slots in zip(messages, slots, strict=True):
        encoded_images = [next(remaining) if slot is None else slot for slot in message_slots]
        placed.append(cast(Message, {**message, IMAGES: encoded_images}) if encoded_images else message)
    return placed


def convert_parts(message: ChatMessage, reader: ImageReader) -> Message:
    """Convert a message with a list of parts to a message with text content, and read its images. An image that the
    column `images` has to provide is None in the result (place_images). Raises ValueError for malformed parts or
    images."""
    content = message.get("content")
    parts: list[JsonObject] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts, slots, has_images = list[str](), list[EncodedImage | None](), False
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind == "text" and isinstance(text, str):
            texts.append(text)
            slots += [None] * text.count(IMAGE_MARK)
        elif kind in ("image", "image_url"):
            texts.append(IMAGE_MARK)
            slots.append(reader.read(part) if any(part.get(key) is not None for key in IMAGE_KEYS) else None)
            has_images = True
        else:
            raise ValueError(f"a part of a message is {part!r:.80}. Its type must be text, image or image_url.")
    if images := message.get("images"):
        if slots.count(None) != len(images):
            raise make_count_error(f"a message of role {message['role']}", slots.count(None), len(images))
        remaining = iter([None if value is None else reader.read(value) for value in images])  # None: in the column
        slots = [next(remaining) if slot is None else slot for slot in slots]
    converted = {**message, "content": "".join(texts)}
    return cast(Message, {**converted, IMAGES: slots} if images or has_images else converted)


def convert_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Convert the messages of an environment: parts, and images of any form. Raises ValueError if one is malformed."""
    return place_images([convert_parts(message, LOCAL_IMAGES) for message in messages])


def _list_slots(message: Message) -> list[EncodedImage | None]:
    """Return an image, or None if the column provides it, for each mark of a converted message."""
    if images := message.get("images"):
        if message["role"] == "assistant":
            raise ValueError("an assistant message has images, which a model cannot generate. Remove them.")
        return [*images]
    return [] if message["role"] == "assistant" else [None] * message["content"].count(IMAGE_MARK)


def _read_url(url: str) -> bytes:
    """Return the bytes of a data: URL, or of the reply of a server."""
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT) as response:
            data = bytes(response.read(MAX_DOWNLOAD + 1))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"the image {url:.80} cannot be read ({error}). Correct the address.") from error
    if len(data) > MAX_DOWNLOAD:
        raise ValueError(f"the image {url:.80} has more than {MAX_DOWNLOAD >> 20} MiB. Use a smaller one.")
    return data


_download = lru_cache(DOWNLOADS_KEPT)(_read_url)
