"""history.jsonl of a run folder: one line per command that has worked in the folder, when it ends."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alphaapollo.runs.record_files import read_records
from alphaapollo.utils.redaction import redact
from alphaapollo.utils.versions import find_commit, list_versions

HISTORY = "history.jsonl"
PACKAGES = ("alphaapollo", "torch", "vllm", "sglang", "transformers", "ray")


@dataclass(frozen=True)
class CommandRecord:
    """A command that has worked in a run folder. Times are in seconds since 1970."""

    command: str
    started: float
    ended: float
    state: str  # finished, failed or interrupted
    error: str  # why it failed; otherwise empty
    versions: dict[str, str]  # installed packages, and the commit of alphaapollo


@contextmanager
def record_in_history(folder: Path) -> Iterator[None]:
    """Context manager that adds a line to the folder's history when the block ends. Does not handle exceptions."""
    started, state, error = time.time(), "finished", ""
    versions = dict(list_versions(PACKAGES)) | {"commit": find_commit() or "unknown"}
    try:
        yield
    except BaseException as failure:
        is_interrupt = isinstance(failure, KeyboardInterrupt)
        state = "interrupted" if is_interrupt else "failed"
        error = "" if is_interrupt else redact(str(failure) or type(failure).__name__)
        raise
    finally:
        record = CommandRecord(describe_command(), started, time.time(), state, error, versions)
        # The folder may have been removed, or the disk may be full, which the command itself reports.
        with suppress(OSError), (folder / HISTORY).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")


def describe_command() -> str:
    """Return the command of this process as it can be typed, with secrets redacted."""
    main = sys.modules["__main__"].__spec__
    program = ["python", "-m", main.name.removesuffix(".__main__")] if main else [Path(sys.argv[0]).name]
    return redact(shlex.join([*program, *sys.argv[1:]]))


def read_history(folder: Path) -> list[CommandRecord]:
    """Read the history of a run folder, oldest command first. Damaged lines are skipped."""
    return read_records(folder / HISTORY, CommandRecord)
