"""status.json of a run folder: what the running command does, rewritten every few seconds and removed at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from alphaapollo.runs.record_files import read_records
from alphaapollo.utils.disk import replace_file

STATUS = "status.json"


@dataclass(frozen=True)
class RunStatus:
    """What a running command does. Times are in seconds since 1970."""

    phase: str = ""  # e.g. generate
    detail: str = ""  # e.g. 12/32, or the called workers
    since: float = 0.0  # start of the phase in this iteration
    written: float = 0.0
    step: int = 0  # completed iterations
    tokens: int = 0  # sampled in the finished groups of the running iteration
    expected_tokens: float = 0.0  # expected in the running iteration; 0: unknown
    seconds_left: float | None = None  # None: unknown
    pid: int = 0


def write_run_status(folder: Path, status: RunStatus) -> None:
    """Write status.json. Raises OSError, e.g. if the folder does not exist yet."""
    replace_file(folder / STATUS, [msgspec.json.encode(status)])


def read_run_status(folder: Path) -> RunStatus | None:
    """Read status.json; None if the file is missing or damaged."""
    return next(iter(read_records(folder / STATUS, RunStatus)), None)
