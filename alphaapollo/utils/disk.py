"""Read files of folders that others may have written, and write files atomically, with errors that explain failures."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

import yaml

from alphaapollo.utils.json_types import Json

MAX_JSON, MAX_YAML = 16 << 20, 1 << 20  # bytes
MAX_DEPTH = 100  # of JSON and YAML
MAX_EXPANDED = 4 << 20  # characters of a YAML file in which each alias is replaced by its value


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes. Raises OSError for pipes, devices and links to other folders, without waiting."""
    target = path.resolve()
    if not target.is_relative_to(path.parent.resolve()):
        raise OSError(errno.EINVAL, "it is a link to another folder. Copy the file", str(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder", str(path))
    return open(target, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_small_file(path: Path, max_bytes: int = MAX_JSON) -> bytes:
    """Return the content of a file. Raises OSError as open_regular does, or if the file is larger than max_bytes."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", str(path))
    return content


def parse_json(text: bytes) -> Json:
    """Parse JSON. Raises ValueError if it is damaged or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    level, depth = [value], 0
    while level := [item for parent in level for item in _list_items(parent)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("its values are nested too deeply")
    return value


def _list_items(value: Json) -> Iterable[Json]:
    items = value if isinstance(value, list) else ()
    return value.values() if isinstance(value, dict) else items


def find_special_file(folder: Path) -> str | None:
    """Return a pipe, a socket or a device in a folder and the folders below it, also one behind a link. Else None."""
    files = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return next((file for file in files if os.path.exists(file) and not os.path.isfile(file)), None)


def read_json(path: Path) -> Json:
    """Parse a small JSON file. Raises OSError as read_small_file does, and ValueError."""
    return parse_json(read_small_file(path))


def read_yaml(path: Path) -> Json:
    """Parse a small YAML file. Raises OSError as read_small_file does, and ValueError."""
    return parse_yaml(read_small_file(path, MAX_YAML))


def parse_yaml(text: bytes | str) -> Json:
    """Parse YAML. Raises ValueError if it is damaged, nested too deeply, or its aliases stand for too much text."""
    loader, size, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0, 0
    try:
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # libyaml would crash the process
                raise ValueError("its values are nested too deeply")
        nodes = [root := yaml.compose(text, loader)]
        while nodes:
            value = getattr(nodes.pop(), "value", "")
            size += 1 + len(value)
            if size > MAX_EXPANDED:
                raise ValueError("its aliases stand for too much text")
            for item in _list_items(value):
                nodes += item if isinstance(item, tuple) else [item]  # a tuple has the nodes of a key and its value
        return loader("").construct_document(root) if root else None
    except (TypeError, RecursionError, OverflowError, yaml.YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from None


@contextmanager
def explain_write_errors(content_name: str, path: Path) -> Iterator[None]:
    """Context manager that replaces an OSError of its block by an OSError that says what failed and how to continue.

    content_name: name of what the block writes to `path`, e.g. "the metrics".
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not write {content_name}: {error.strerror}. Free disk space or fix permissions; the same command "
            "resumes from the last checkpoint",
            str(path),
        ) from error


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Context manager that replaces any error of its block, which reads a file, by a ValueError that names the file."""
    try:
        yield
    except Exception as error:  # what damaged content raises depends on the library and on the content
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} cannot be read ({why:.300}). Use an intact copy of its folder.") from error


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file under a temporary name and rename it, so that `path` never has incomplete content."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.writelines(lines)
    part.replace(path)


def replace_folder(written: Path, folder: Path) -> None:
    """Rename the complete folder `written` to `folder`. Until then, the earlier one exists, perhaps as `replaced`."""
    replaced = folder.with_name(f".replaced_{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    written.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Undo a replace_folder that was killed between its two renames."""
    replaced = folder.with_name(f".replaced_{folder.name}")
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def close_all(*close_functions: Callable[[], None]) -> None:
    """Call all functions, then raise the first OSError that they raised. For use in a `finally` block: if another
    exception is active, no OSError is raised, because closing usually fails, too, after a write to a full disk."""
    active_error, failures = sys.exc_info()[1], list[OSError]()
    for close in close_functions:
        try:
            close()
        except OSError as error:
            failures.append(error)
    if failures and active_error is None:
        raise failures[0]
