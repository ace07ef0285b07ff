"""Read data files into lists of dicts. A ValueError names the file that cannot be read.

Formats: parquet, arrow (of the library datasets), jsonl, json, csv and tsv, the text formats also compressed. Folders,
globs and ids on the Hugging Face hub are resolved to such files in data/resolved_files.py.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alphaapollo.data.resolved_files import resolve_entry
from alphaapollo.utils.hub import DATA_FILE

T = TypeVar("T")
DataRow = dict[str, Any]  # column -> plain Python value: nested parquet columns come as dicts and lists
MAX_BAD_ROWS_SHOWN = 5
SUFFIXES = (".parquet", ".jsonl", ".json")
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
SEPARATORS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class BadRow:
    """An unreadable row of a json or jsonl file."""

    reason: str  # kind of error, equal for all rows with the same error
    location: str  # file and line
    detail: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason} ({self.detail})."


class DataRows(list[DataRow]):
    """Rows of an entry of data.train_files, in order."""

    def __init__(self, rows: Iterable[DataRow], locations: Sequence[str]):
        super().__init__(rows)
        self.locations = locations  # of each row, e.g. "train.jsonl, row 7"


def to_file_list(files: str | Sequence[str]) -> list[str]:
    """Return `[files]` for a single path, else a list of the paths."""
    return [files] if isinstance(files, str) else list(files)


def read_rows(path: str | Path) -> DataRows:
    """Read all rows of an entry of data.train_files, `PATH_OR_ID[:config][@revision][#split]` (resolved_files.py).

    Rows of a data set on the hub without a column `data_source` get the id of the data set as `data_source`. Raises
    ValueError if there are no such files or no rows, or if a file or one of its rows is unreadable.
    """
    source = resolve_entry(str(path))
    if source.dataset is not None:
        tables = [(str(path), list[DataRow](source.dataset.with_format("arrow")[:].to_pylist()))]
    else:
        names = [str(path)] if len(source.files) == 1 else [str(file) for file in source.files]
        tables = [(name, _read_valid_rows(file)) for name, file in zip(names, source.files, strict=True)]
    rows = [row for _, table in tables for row in table]
    if not rows:
        raise ValueError(f"{path}: the file has no rows. Use a file with data.")
    if source.hub_id and "data_source" not in list_column_names(rows):
        rows = [row | {"data_source": source.hub_id} for row in rows]
    return DataRows(rows, [f"{name}, row {index}" for name, table in tables for index in range(len(table))])


def read_rows_leniently(path: str | Path) -> list[DataRow | BadRow]:
    """Read all rows like read_rows, but return an unreadable row as BadRow instead of raising ValueError.

    Invalid UTF-8 bytes become surrogates, and unpaired surrogates are unchanged.
    """
    rows = _read_data_file(Path(path).expanduser(), strict=False)
    if not rows:
        raise ValueError(f"{path}: the file has no rows. Use a file with data.")
    return rows


def convert_rows(path: str, rows: DataRows, convert_row: Callable[[DataRow], T]) -> list[T]:
    """Apply `convert_row` to each row of the file `path`. The ValueErrors of all rows are raised as one ValueError."""
    converted, errors = [], dict[int, ValueError]()
    for index, row in enumerate(rows):
        try:
            converted.append(convert_row(row))
        except ValueError as error:
            errors[index] = error
    if errors:
        first = [(rows.locations[index], error) for index, error in errors.items()][:MAX_BAD_ROWS_SHOWN]
        shown = "\n  ".join(f"{location.removeprefix(f'{path}, ')}: {error}" for location, error in first)
        more = f"\n  and {len(errors) - MAX_BAD_ROWS_SHOWN} more" if len(errors) > MAX_BAD_ROWS_SHOWN else ""
        raise ValueError(
            f"{path}: {len(errors)} of {len(rows)} rows are invalid (row numbers start at 0):\n  {shown}{more}"
        )
    return converted


def list_column_names(rows: Iterable[DataRow]) -> list[str]:
    """Return the names of the columns that occur in any row, in order of appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _read_valid_rows(path: Path) -> list[DataRow]:
    rows = _read_data_file(path, strict=True)
    if invalid := next((row for row in rows if isinstance(row, BadRow)), None):
        raise ValueError(str(invalid))
    return [row for row in rows if not isinstance(row, BadRow)]


def _read_data_file(path: Path, strict: bool) -> list[DataRow | BadRow]:
    (path,) = resolve_entry(str(path)).files
    match = DATA_FILE.search(path.name)
    assert match is not None
    kind = match[1].lower()
    if kind in ("parquet", "arrow"):
        return [*_read_table(path, kind)]
    text = _read_text(path, strict)
    return _read_csv(path, text, SEPARATORS[kind]) if kind in SEPARATORS else _read_json(path, text, kind, strict)


def _read_table(path: Path, kind: str) -> list[DataRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        if kind == "parquet":
            return list(pyarrow.parquet.read_table(path).to_pylist())
        try:
            return list(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all().to_pylist())
        except pyarrow.ArrowInvalid:
            return list(pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all().to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # ValueError: invalid UTF-8
        raise ValueError(f"{path}: the file is not a readable {kind} file ({error}). Create it again.") from error


def _read_text(path: Path, strict: bool) -> str:
    """Return the text of a file, decompressed as its suffix says."""
    try:
        content = path.read_bytes() if path.suffix.lower() not in COMPRESSED else _decompress(path)
        return content.decode("utf-8-sig", "strict" if strict else "surrogateescape")
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: the file is not readable UTF-8 text ({error}). Save it as UTF-8.") from error


def _decompress(path: Path) -> bytes:
    import pyarrow

    with pyarrow.input_stream(str(path), compression="detect") as stream:
        return bytes(stream.read())


def _read_csv(path: Path, text: str, separator: str) -> list[DataRow | BadRow]:
    """Parse a file with a header. Cells are text, as they are written; an empty cell is None."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        header, *rows = [cells for cells in reader if cells] or [[]]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}. Quote the cell, or save the file again.") from error
    if len({*header}) < len(header):
        raise ValueError(f"{path}: two columns have the same name ({', '.join(header)}). Rename one of them.")
    return [
        dict(zip(header, [cell or None for cell in cells], strict=True))
        if len(cells) == len(header)
        else BadRow("not as many cells as the header", f"{path}, row {number}", f"{len(cells)}, not {len(header)}")
        for number, cells in enumerate(rows)
    ]


def _read_json(path: Path, text: str, kind: str, strict: bool) -> list[DataRow | BadRow]:
    check_surrogates = strict and SURROGATE_ESCAPE.search(text) is not None
    values = _parse_json(text, f"{path}") if kind == "json" else None
    if isinstance(values, BadRow) and isinstance(_parse_json(text.lstrip().partition("\n")[0], ""), dict):
        values = None  # JSON lines in a .json file
    if values is None:
        lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [_check_json_row(_parse_json(line, location), location, check_surrogates) for location, line in lines]
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
