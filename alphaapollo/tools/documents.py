"""Split the documents in a folder into passages for the search index of the tool local_rag."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PASSAGE_FILE = ".jsonl"  # one passage per line: {"contents": ...}, as in the corpora of Search-R1
SUFFIXES = (".md", ".markdown", ".rst", ".txt", ".py", ".pyi", PASSAGE_FILE)
PASSAGE_CHARACTERS = 1500
MAX_FILE_BYTES = 4 << 20

_WORD = re.compile(r"[^\W_]+(?:_+[^\W_]+)*")
_WORD_PART = re.compile(r"[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+|\d+")
_COMMON_WORDS = """
a an and are as at be but by for from has have how i if in into is it its no not of on or so such than that the their
then there these they this to use was what when where which will with you your
"""
_STOP_WORDS = frozenset(_COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class Passage:
    """Part of a document, e.g. `Passage("solvers/ode.md", 12, "dsolve(eq, func) solves ...")`."""

    path: str  # relative to the repository's folder
    line: int  # line number of its first line, starting at 1
    text: str


def tokenize(text: str) -> list[str]:
    """Return the lower-case words of a text without stop words, and the parts of identifiers.

    >>> tokenize("Use the BlockMatrix.from_list")
    ['blockmatrix', 'block', 'matrix', 'from_list', 'list']
    """
    found = []
    for word in _WORD.findall(text):
        parts = _WORD_PART.findall(word)
        candidates = [word, *parts] if len(parts) > 1 else [word]
        found += [lower for part in candidates if (lower := part.lower()) not in _STOP_WORDS]
    return found


def split_passages(path: str, text: str) -> Iterator[Passage]:
    """Split a document into passages of up to PASSAGE_CHARACTERS: join short paragraphs, split long paragraphs."""
    begin, lines, size = 1, list[str](), 0
    for number, line in enumerate(text.splitlines(), start=1):
        is_full = size + len(line) > PASSAGE_CHARACTERS
        if lines and (is_full or (not line.strip() and size > PASSAGE_CHARACTERS // 2)):
            yield from _yield_nonempty_passage(path, begin, lines)
            begin, lines, size = number, [], 0
        lines.append(line[: 4 * PASSAGE_CHARACTERS])
        size += len(line) + 1
    yield from _yield_nonempty_passage(path, begin, lines)


def _yield_nonempty_passage(path: str, first_line: int, lines: list[str]) -> Iterator[Passage]:
    """Yield the passage of these lines, unless all are empty. `first_line`: number of the first line."""
    text = "\n".join(lines)
    if text.strip():
        first_line += next(index for index, line in enumerate(lines) if line.strip())
        yield Passage(path, first_line, text.strip("\n"))


def read_passage_file(path: str, file: Path) -> Iterator[Passage]:
    """Yield the entry `contents` of each line of a jsonl file. Raises ValueError for a line without it."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield Passage(path, number, str(json.loads(line)["contents"]))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{file}:{number}: not a passage. Write {{"contents": "text"}} on each line.'
                ) from error


def read_passages(folder: Path) -> tuple[list[Passage], Counter[str]]:
    """Return the passages of all documents below a folder, and the number of skipped files per reason."""
    passages: list[Passage] = []
    skipped: Counter[str] = Counter()
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        if file.suffix.lower() not in SUFFIXES:
            skipped[f"not one of {' '.join(SUFFIXES)}"] += 1
        elif file.suffix.lower() == PASSAGE_FILE:
            passages += read_passage_file(file.relative_to(folder).as_posix(), file)
        elif file.stat().st_size > MAX_FILE_BYTES:
            skipped[f"over {MAX_FILE_BYTES >> 20} MiB"] += 1
        else:
            try:
                passages += split_passages(file.relative_to(folder).as_posix(), file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
    return passages, skipped
