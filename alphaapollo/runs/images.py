"""Pictures of a log: each distinct picture is one file, named by its content, and messages refer to the file.

    rollouts/step_000012.jsonl    {"content": "<image> How many?", "images": ["images/0a1b...png"]}
    rollouts/images/0a1b...png    the picture as the data or the environment gave it, not resized

So a log does not depend on the files of the data, and its messages are valid prompts of a data file in its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alphaapollo.types import Picture
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


def read_picture_bytes(picture: Picture) -> bytes:
    """Return the encoded picture. Raises OSError if its file cannot be read."""
    return picture if isinstance(picture, bytes) else Path(picture).expanduser().read_bytes()


def find_picture_extension(data: bytes) -> str:
    """Return the extension of an encoded picture, e.g. "png"; "bin" for an unknown format."""
    return next((name for start, name in SIGNATURES.items() if data.startswith(start)), "bin")


def name_picture(picture: Picture) -> str:
    """Return the name of a picture in a log, e.g. images/0a1b...png; the path itself of a file that cannot be read."""
    try:
        data = read_picture_bytes(picture)
    except OSError:
        return str(picture)  # the reason is in the score of its episode
    return f"{FOLDER}/{hashlib.blake2b(data, digest_size=16).hexdigest()}.{find_picture_extension(data)}"


def save_picture(folder: Path, picture: Picture) -> str:
    """Write a picture to the subfolder `images` of a log's folder, unless it exists. Returns its name_picture."""
    name = name_picture(picture)
    path = folder / name
    if name != picture and not path.exists():
        path.parent.mkdir(exist_ok=True)
        replace_file(path, [read_picture_bytes(picture)])
    return name


def replace_pictures(content: Any, name: Callable[[Picture], str] = name_picture) -> Any:
    """Return messages with the names of their pictures. A text is returned unchanged."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    return [{**one, "images": [*map(name, one["images"])]} if one.get("images") else one for one in content]
