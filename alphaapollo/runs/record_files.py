"""JSON records of a run folder, one per line, without secrets."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from alphaapollo.utils.disk import explain_write_errors, read_small_file, replace_file
from alphaapollo.utils.redaction import find_secret_variables, redact_values

MAX_BYTES = 64 << 20  # of a file
T = TypeVar("T")


def write_records(path: Path, records: Iterable[object]) -> None:
    """Write one JSON line per record, with secrets redacted. Raises OSError if the file cannot be written."""
    secrets = find_secret_variables()
    lines = (msgspec.json.encode(redact_values(msgspec.to_builtins(record), secrets)) + b"\n" for record in records)
    with explain_write_errors("the description of the run", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lines)


def read_records(path: Path, kind: type[T]) -> list[T]:
    """Read the lines of a file; empty if the file is missing or no small file. Damaged lines are skipped."""
    records = list[T]()
    with suppress(OSError):
        for line in read_small_file(path, MAX_BYTES).splitlines():
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                records.append(msgspec.json.decode(line, type=kind))
    return records
