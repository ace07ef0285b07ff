"""Texts of trajectories for the search: one temporary file, in which each trajectory is a line in lower case.

rollouts/step_000012.jsonl -> parts of a few MiB (table `texts`: first line, offset, bytes) -> lines with some words
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

PART_BYTES = 2**22


class TextWriter:
    """Writer of the texts of one file of trajectories. Lines that are skipped, because they are damaged, are empty."""

    def __init__(self, path: Path, database: sqlite3.Connection, place: tuple[int, str, int]):
        """place: run, kind and step of the file."""
        self._path, self._database, self._place = path, database, place
        self._first, self._size, self._lines = 0, 0, list[bytes]()

    def add(self, line: int, texts: Iterable[str]) -> None:
        """Add the texts of a trajectory, whose number must be above that of the last one."""
        if not self._lines:
            self._first = line
        self._lines += [b""] * (line - self._first - len(self._lines))
        text = normalize("\0".join(texts))
        self._lines.append(text)
        self._size += len(text) + 1
        if self._size >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        if self._lines:
            with self._path.open("ab") as file:
                content = b"\n".join(self._lines)
                position = (self._first, file.tell(), len(content))
                file.write(content)
            self._database.execute("INSERT INTO texts VALUES (?, ?, ?, ?, ?, ?)", (*self._place, *position))
            self._lines, self._size = [], 0


def normalize(text: str) -> bytes:
    """Return a text in lower case, on one line."""
    return text.lower().replace("\n", " ").encode("utf-8", "replace")


def list_message_texts(content: object) -> Iterator[str]:
    """Yield the texts of a prompt, which is a text or messages, or of the content of a message."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for item in content:
            yield from list_message_texts(item)
    elif isinstance(content, dict):
        yield from list_message_texts(content.get("content", content.get("text")))


def find_lines(database: sqlite3.Connection, path: Path, place: tuple[int, str, int], words: str) -> set[int]:
    """Return the numbers of the trajectories of a file that contain the words, regardless of case. path: file of texts.
    place: run, kind and step."""
    wanted, line_numbers = normalize(words), set[int]()
    parts = "SELECT line, offset, bytes FROM texts WHERE run = ? AND kind = ? AND step = ?"
    for first, offset, size in map(tuple, database.execute(parts, place)):
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(size)
        if wanted in content:
            line_numbers |= {line for line, text in enumerate(content.split(b"\n"), first) if wanted in text}
    return line_numbers
