"""Read data files into plain Python rows. An unreadable file raises a ValueError that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
DataRow = dict[str, Any]  # column -> plain Python value: nested parquet columns come as dicts and lists
MAX_BAD_ROWS_SHOWN = 5
SUFFIXES = (".parquet", ".jsonl", ".json")
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class BadRow:
    """An unreadable row of a json or jsonl file."""

    reason: str  # equal for all rows with this problem
    location: str  # file and line
    detail: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason} ({self.detail})."


def to_file_list(files: str | Sequence[str]) -> list[str]:
    """Convert one file or several to a list."""
    return [files] if isinstance(files, str) else list(files)


def read_rows(path: str | Path) -> list[DataRow]:
    """All rows of a parquet, jsonl (one object per line; blank lines are skipped) or json (a list of objects) file.

    Raises:
        ValueError: the file does not exist, has another type, cannot be read (or one of its rows), or has no rows.
    """
    rows = _read_file(path, strict=True)
    if bad := next((row for row in rows if isinstance(row, BadRow)), None):
        raise ValueError(str(bad))
    return [row for row in rows if not isinstance(row, BadRow)]


def read_rows_leniently(path: str | Path) -> list[DataRow | BadRow]:
    """Like read_rows, but unreadable rows are returned as BadRow, invalid UTF-8 bytes as surrogates, and unpaired
    surrogates unchanged.

    Raises:
        ValueError: the file does not exist, has another type, cannot be read at all, or has no rows.
    """
    return _read_file(path, strict=False)


def convert_rows(path: str, rows: Sequence[DataRow], convert: Callable[[DataRow], T]) -> list[T]:
    """Convert the rows of a file. Raises one ValueError for all rows that `convert` rejects; it shows the first few."""
    converted, problems = [], []
    for index, row in enumerate(rows):
        try:
            converted.append(convert(row))
        except ValueError as error:
            problems.append(f"row {index}: {error}")
    if problems:
        shown = "\n  ".join(problems[:MAX_BAD_ROWS_SHOWN])
        more = f"\n  and {len(problems) - MAX_BAD_ROWS_SHOWN} more" if len(problems) > MAX_BAD_ROWS_SHOWN else ""
        raise ValueError(f"{path}: {len(problems)} of {len(rows)} rows are bad (rows count from 0):\n  {shown}{more}")
    return converted


def column_names(rows: Iterable[DataRow]) -> list[str]:
    """The columns that any row has, in order of appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _read_file(path: str | Path, strict: bool) -> list[DataRow | BadRow]:
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path}: no such file (working folder: {Path.cwd()}).")
    if path.is_dir() or path.suffix not in SUFFIXES:
        kind = "is a folder" if path.is_dir() else f"ends in {path.suffix!r}"
        raise ValueError(f"{path}: {kind}; give a file that ends in one of {', '.join(SUFFIXES)}.")
    rows: Sequence[DataRow | BadRow] = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path, strict)
    if not rows:
        raise ValueError(f"{path}: has no rows.")
    return list(rows)


def _read_parquet(path: Path) -> list[DataRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # ValueError: invalid UTF-8
        raise ValueError(f"{path}: not a readable parquet file ({error}).") from error


def _read_json(path: Path, strict: bool) -> list[DataRow | BadRow]:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="strict" if strict else "surrogateescape")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a readable UTF-8 text file ({error}).") from error
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        return [_parse_row(line, f"{path}, line {number}", strict) for number, line in lines if line.strip()]
    values = _parse_json(text, f"{path}")
    if isinstance(values, BadRow):
        raise ValueError(str(values))
    if not isinstance(values, list):
        raise ValueError(f"{path}: contains a {type(values).__name__}; a .json file must hold a list of objects.")
    check_surrogates = strict and SURROGATE_ESCAPE.search(text) is not None
    return [_check_object(value, f"{path}, row {index}", check_surrogates) for index, value in enumerate(values)]


def _parse_row(line: str, location: str, strict: bool) -> DataRow | BadRow:
    value, check_surrogates = _parse_json(line, location), strict and SURROGATE_ESCAPE.search(line) is not None
    return value if isinstance(value, BadRow) else _check_object(value, location, check_surrogates)


def _check_object(value: Any, location: str, check_surrogates: bool) -> DataRow | BadRow:
    """Check a parsed row. check_surrogates: whether it may contain unpaired surrogates."""
    if not isinstance(value, dict):
        return BadRow("not an object {...}", location, f"a {type(value).__name__}")
    if check_surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            surrogate = f"\\u{ord(error.object[error.start]):04x}"
            return BadRow("has an unpaired surrogate, which is not a character", location, surrogate)
    return value


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also raised for a number with too many digits
        return BadRow("not valid JSON", location, str(error))
