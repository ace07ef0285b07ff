"""Data files to plain Python rows; every unreadable file is a ValueError that names it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DataRow = dict[str, Any]  # column -> plain Python value: nested parquet columns come as dicts and lists
SUFFIXES = (".parquet", ".jsonl", ".json")


def file_list(files: str | Sequence[str]) -> list[str]:
    """One file or several, as a list."""
    return [files] if isinstance(files, str) else list(files)


def read_rows(path: str | Path) -> list[DataRow]:
    """All rows of a parquet, jsonl (an object a line; blank lines are skipped) or json (a list of objects) file.

    Raises:
        ValueError: no such file, another kind of file, unreadable, or without rows.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path}: no such file (working folder: {Path.cwd()}).")
    if path.is_dir() or path.suffix not in SUFFIXES:
        kind = "is a folder" if path.is_dir() else f"ends in {path.suffix!r}"
        raise ValueError(f"{path}: {kind}; give a file that ends in one of {', '.join(SUFFIXES)}.")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
    if not rows:
        raise ValueError(f"{path}: has no rows.")
    return rows


def columns_of(rows: Iterable[DataRow]) -> list[str]:
    """The columns that any row has, in order of appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _read_parquet(path: Path) -> list[DataRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}).") from error


def _read_json(path: Path) -> list[DataRow]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a readable UTF-8 text file ({error}).") from error
    if path.suffix == ".json":
        rows = _parse(text, f"{path}")
        if not isinstance(rows, list):
            raise ValueError(f"{path}: holds a {type(rows).__name__}; a .json file must hold a list of objects.")
    else:
        rows = [_parse(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {index}: is a {type(row).__name__}; each row must be an object {{...}}.")
    return rows


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error}).") from error
