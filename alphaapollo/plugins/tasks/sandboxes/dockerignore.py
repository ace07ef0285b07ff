"""Reader of .dockerignore: which files of a build context no instruction of a Dockerfile can copy."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from alphaapollo.utils.disk import read_small_file

MAX_BYTES, MAX_PATTERNS = 1 << 20, 1000
_TOKEN = re.compile(r"\*+|\?|\\.|\[(?:\\.|[^\]\\])+\]|.", re.DOTALL)
_Pattern = list[re.Pattern[str] | None]  # of each name of a path; None: "**", any number of folders


class IgnoredFiles:
    """The files that Dockerfile.dockerignore or .dockerignore excludes. As in docker, the last pattern that matches a
    path, or a folder above it, decides; a pattern after "!" includes. Raises ValueError for an invalid pattern."""

    def __init__(self, context: Path):
        self._context, self._patterns = context, list[tuple[bool, _Pattern]]()
        names = ("Dockerfile.dockerignore", ".dockerignore")
        if not (file := next((context / name for name in names if (context / name).is_file()), None)):
            return
        lines = read_small_file(file.resolve(), MAX_BYTES).decode("utf-8-sig", "replace").splitlines()
        lines = [line.strip() for line in lines if not line.startswith("#") and line.strip(" \t!/")]
        if len(lines) > MAX_PATTERNS:
            raise ValueError(f"{file}: {len(lines)} patterns. Write at most {MAX_PATTERNS}.")
        for line in lines:
            path = posixpath.normpath(line.removeprefix("!").strip()).lstrip("/")
            try:
                pattern = [None if name == "**" else _compile_name(name) for name in path.split("/")]
            except re.error as error:
                raise ValueError(f"{file}: the pattern {line!r} is invalid ({error}). Correct it.") from None
            self._patterns.insert(0, (line.startswith("!"), pattern))

    def walk(self, source: Path) -> Iterator[Path]:
        """Yield a file, or a folder and all below it, sorted, without what is excluded."""
        return (path for path in (source, *sorted(source.rglob("*"))) if not (self._patterns and self._excludes(path)))

    def _excludes(self, path: Path) -> bool:
        names = path.relative_to(self._context).parts
        return not next((includes for includes, pattern in self._patterns if _matches(pattern, names)), True)


def _compile_name(name: str) -> re.Pattern[str]:
    """Translate a pattern of a name. Each star takes as little as it can and never more, which is enough and fast."""
    pieces = [""]
    for token in _TOKEN.findall(name):
        if token.startswith("*"):
            pieces.append("")
        elif token == "?":
            pieces[-1] += "."
        else:
            pieces[-1] += token if token.startswith("[") and len(token) > 1 else re.escape(token[-1])
    first, *others = pieces
    inner = "".join(f"(?>.*?{piece})" for piece in others[:-1])
    return re.compile(f"{first}{inner}{'.*' if others else ''}{''.join(others[-1:])}", re.DOTALL)


def _matches(pattern: _Pattern, names: Sequence[str]) -> bool:
    """Whether the pattern matches the path of these names, or a folder above it."""
    ends = {0}  # after how many names a match of the pattern's beginning can end
    for index, one in enumerate(pattern):
        if one is None and ends:
            ends = set(range(min(ends) + (index == len(pattern) - 1), len(names) + 1))
        elif one is not None:
            ends = {end + 1 for end in ends if end < len(names) and one.fullmatch(names[end])}
    return max(ends, default=0) > 0
