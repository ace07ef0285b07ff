"""Read parquet, jsonl and json files into lists of dicts. A ValueError names the file that cannot be read."""

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

    reason: str  # kind of error, equal for all rows with the same error
    location: str  # file and line
    detail: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason} ({self.detail})."


def to_file_list(files: str | Sequence[str]) -> list[str]:
    """Return `[files]` for a single path, else a list of the paths."""
    return [files] if isinstance(files, str) else list(files)


def read_rows(path: str | Path) -> list[DataRow]:
    """Read all rows of a parquet, jsonl (one object per line) or json (list of objects) file.

    Raises ValueError if the file is missing, empty or of another type, or if the file or one of its rows is unreadable.
    """
    rows = _read_data_file(path, strict=True)
    if invalid := next((row for row in rows if isinstance(row, BadRow)), None):
        raise ValueError(str(invalid))
    return [row for row in rows if not isinstance(row, BadRow)]


def read_rows_leniently(path: str | Path) -> list[DataRow | BadRow]:
    """Read all rows like read_rows, but return an unreadable row as BadRow instead of raising ValueError.

    Invalid UTF-8 bytes become surrogates, and unpaired surrogates are unchanged.
    """
    return _read_data_file(path, strict=False)


def convert_rows(path: str, rows: Sequence[DataRow], convert_row: Callable[[DataRow], T]) -> list[T]:
    """Apply `convert_row` to each row of the file `path`. The ValueErrors of all rows are raised as one ValueError."""
    converted, errors = [], []
    for index, row in enumerate(rows):
        try:
            converted.append(convert_row(row))
        except ValueError as error:
            errors.append(f"row {index}: {error}")
    if errors:
        shown = "\n  ".join(errors[:MAX_BAD_ROWS_SHOWN])
        more = f"\n  and {len(errors) - MAX_BAD_ROWS_SHOWN} more" if len(errors) > MAX_BAD_ROWS_SHOWN else ""
        raise ValueError(
            f"{path}: {len(errors)} of {len(rows)} rows are invalid (row numbers start at 0):\n  {shown}{more}"
        )
    return converted


def list_column_names(rows: Iterable[DataRow]) -> list[str]:
    """Return the names of the columns that occur in any row, in order of appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _read_data_file(path: str | Path, strict: bool) -> list[DataRow | BadRow]:
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path}: no such file (working folder: {Path.cwd()}). Correct the path.")
    if path.is_dir() or path.suffix not in SUFFIXES:
        kind = "a folder" if path.is_dir() else f"a file with the suffix {path.suffix!r}"
        raise ValueError(f"{path} is {kind}. Use a file with one of the suffixes {', '.join(SUFFIXES)}.")
    rows: Sequence[DataRow | BadRow] = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path, strict)
    if not rows:
        raise ValueError(f"{path}: the file has no rows. Use a file with data.")
    return list(rows)


def _read_parquet(path: Path) -> list[DataRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # ValueError: invalid UTF-8
        raise ValueError(f"{path}: the file is not a readable parquet file ({error}). Create it again.") from error


def _read_json(path: Path, strict: bool) -> list[DataRow | BadRow]:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="strict" if strict else "surrogateescape")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: the file is not readable UTF-8 text ({error}). Save it as UTF-8.") from error
    check_surrogates = strict and SURROGATE_ESCAPE.search(text) is not None
    if path.suffix == ".jsonl":
        lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [_check_json_row(_parse_json(line, location), location, check_surrogates) for location, line in lines]
    values = _parse_json(text, f"{path}")
    if isinstance(values, BadRow):
        raise ValueError(str(values))
    if not isinstance(values, list):
        raise ValueError(
            f"{path}: the file contains a {type(values).__name__}, but a .json file must contain a list of objects."
        )
    return [_check_json_row(value, f"{path}, row {index}", check_surrogates) for index, value in enumerate(values)]


def _check_json_row(value: object, location: str, check_surrogates: bool) -> DataRow | BadRow:
    """Return a parsed row, or BadRow if it is not an object or (with check_surrogates) has an unpaired surrogate."""
    if isinstance(value, BadRow):
        return value
    if not isinstance(value, dict):
        return BadRow("not an object {...}", location, f"a {type(value).__name__}")
    if check_surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            surrogate = f"\\u{ord(error.object[error.start]):04x}"
            return BadRow("has an unpaired surrogate, which is not a character", location, surrogate)
    return value


def _parse_json(text: str, location: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also raised for a number with too many digits
        return BadRow("not valid JSON", location, str(error))
