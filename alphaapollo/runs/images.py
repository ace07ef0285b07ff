"""Images of a log: each distinct image is one file, named by its content, and messages refer to the file.

    rollouts/step_000012.jsonl    {"content": "<image> How many?", "images": ["images/0a1b...png"]}
    rollouts/images/0a1b...png    the image as the data or the environment gave it, not resized

So a log does not depend on the files of the data, and its messages are valid prompts of a data file in its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alphaapollo.types import EncodedImage
from alphaapollo.utils.disk import replace_file

FOLDER = "images"
SIGNATURES = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}  # first bytes of a file -> its extension


def read_image_bytes(encoded_image: EncodedImage) -> bytes:
    """Return the encoded image. Raises OSError if its file cannot be read."""
    return encoded_image if isinstance(encoded_image, bytes) else Path(encoded_image).expanduser().read_bytes()


def find_image_extension(data: bytes) -> str:
    """Return the extension of an encoded image, e.g. "png"; "bin" for an unknown format."""
    return next((name for start, name in SIGNATURES.items() if data.startswith(start)), "bin")


def name_image(encoded_image: EncodedImage) -> str:
    """Return the name of an image in a log, e.g. images/0a1b...png; the path itself of a file that cannot be read."""
    try:
        data = read_image_bytes(encoded_image)
    except OSError:
        return str(encoded_image)  # the reason is in the score of its episode
    return f"{FOLDER}/{hashlib.blake2b(data, digest_size=16).hexdigest()}.{find_image_extension(data)}"


def save_image(folder: Path, encoded_image: EncodedImage) -> str:
    """Write an image to the subfolder `images` of a log's folder, unless it exists. Returns its name_image."""
    name = name_image(encoded_image)
    path = folder / name
    if name != encoded_image and not path.exists():
        path.parent.mkdir(exist_ok=True)
        replace_file(path, [read_image_bytes(encoded_image)])
    return name


def replace_images(content: Any, name: Callable[[EncodedImage], str] = name_image) -> Any:
    """Return messages with the names of their images. A text is returned unchanged."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    return [{**one, "images": [*map(name, one["images"])]} if one.get("images") else one for one in content]
