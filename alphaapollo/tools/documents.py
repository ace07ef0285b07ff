"""Files of a folder as passages that a search can return."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".md", ".markdown", ".rst", ".txt", ".py", ".pyi")
PASSAGE_CHARACTERS = 1500
MAX_FILE_BYTES = 4 << 20

_WORD = re.compile(r"[^\W_]+(?:_+[^\W_]+)*")
_PART = re.compile(r"[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+|\d+")
_COMMON_WORDS = """
a an and are as at be but by for from has have how i if in into is it its no not of on or so such than that the their
then there these they this to use was what when where which will with you your
"""
_COMMON = frozenset(_COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class Passage:
    """Example: `Passage("solvers/ode.md", 12, "dsolve(eq, func) solves ...")`."""

    path: str  # inside its folder
    line: int  # where it begins, from 1
    text: str


def words_of(text: str) -> list[str]:
    """What is compared: words in lower case, identifiers whole and in parts, without the commonest English words.

    >>> words_of("Use the BlockMatrix.from_list")
    ['blockmatrix', 'block', 'matrix', 'from_list', 'list']
    """
    found = []
    for word in _WORD.findall(text):
        parts = _PART.findall(word)
        candidates = [word, *parts] if len(parts) > 1 else [word]
        found += [lower for part in candidates if (lower := part.lower()) not in _COMMON]
    return found


def passages_of(path: str, text: str) -> Iterator[Passage]:
    """Blocks between blank lines, put together up to PASSAGE_CHARACTERS; a longer one is cut at a line."""
    begin, lines, size = 1, list[str](), 0
    for number, line in enumerate(text.splitlines(), start=1):
        full = size + len(line) > PASSAGE_CHARACTERS
        if lines and (full or (not line.strip() and size > PASSAGE_CHARACTERS // 2)):
            yield from _passage(path, begin, lines)
            begin, lines, size = number, [], 0
        lines.append(line[: 4 * PASSAGE_CHARACTERS])
        size += len(line) + 1
    yield from _passage(path, begin, lines)


def _passage(path: str, begin: int, lines: list[str]) -> Iterator[Passage]:
    text = "\n".join(lines)
    if text.strip():
        begin += next(index for index, line in enumerate(lines) if line.strip())
        yield Passage(path, begin, text.strip("\n"))


def read_folder(folder: Path) -> tuple[list[Passage], dict[str, int]]:
    """The passages of all documents below a folder, and how many files were left out, by reason."""
    passages: list[Passage] = []
    left_out: dict[str, int] = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        reason, text = _read(file)
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            passages += passages_of(file.relative_to(folder).as_posix(), text)
    return passages, left_out


def _read(file: Path) -> tuple[str, str]:
    """Why it is left out, or its text."""
    if file.suffix.lower() not in SUFFIXES:
        return f"not one of {' '.join(SUFFIXES)}", ""
    if file.stat().st_size > MAX_FILE_BYTES:
        return f"over {MAX_FILE_BYTES >> 20} MiB", ""
    try:
        return "", file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "not UTF-8", ""
