"""Write and read history.jsonl of a run folder, with one line per command that has worked in the folder, when it ends,
and plan.json, the plan of the newest start as it was printed."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from alphaapollo.runs.input_digests import Digests
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.redaction import find_secret_variables, redact, redact_values
from alphaapollo.utils.versions import find_commit, list_versions

HISTORY, PLAN = "history.jsonl", "plan.json"
PACKAGES = ("alphaapollo", "torch", "vllm", "transformers", "ray")


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
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    except BaseException as failure:
        state, error = "failed", redact(str(failure) or type(failure).__name__)
        raise
    finally:
        record = CommandRecord(describe_command(), started, time.time(), state, error, versions)
        # The folder may have been removed, or the disk may be full, which the command itself reports.
        with suppress(OSError), (folder / HISTORY).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")


def read_history(folder: Path) -> list[CommandRecord]:
    """Read the history of a run folder, oldest command first. Damaged lines are skipped."""
    try:
        lines = (folder / HISTORY).read_bytes().splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            records.append(msgspec.json.decode(line, type=CommandRecord))
    return records


def describe_command() -> str:
    """Return the command of this process as it can be typed, with secrets redacted."""
    main = sys.modules["__main__"].__spec__
    program = ["python", "-m", main.name.removesuffix(".__main__")] if main else [Path(sys.argv[0]).name]
    return redact(shlex.join([*program, *sys.argv[1:]]))


@dataclass(frozen=True)
class PlannedMemory:
    """Planned memory of a GPU, or of a machine without GPUs."""

    device: str  # e.g. "a GPU of 80 GiB"
    gib: dict[str, dict[str, float]]  # moment of an iteration -> kind -> GiB; kinds without memory are left out


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run before its start."""

    settings: dict[str, str]  # label -> text, e.g. "iterations" -> "8"
    memory: PlannedMemory | None = None  # None: the run starts no training, or its memory cannot be calculated
    notices: list[str] = field(default_factory=list)
    inputs: Digests = field(default_factory=dict)


def write_run_plan(folder: Path, plan: RunPlan) -> None:
    """Write plan.json, with secrets redacted. Raises OSError if it cannot be written."""
    with explain_write_errors("the plan", folder / PLAN):
        folder.mkdir(parents=True, exist_ok=True)
        values = redact_values(msgspec.to_builtins(plan), find_secret_variables())
        replace_file(folder / PLAN, [msgspec.json.encode(values)])


def read_input_digests(folder: Path) -> Digests:
    """Read the digests of the inputs at the newest start; empty if an earlier version started the run."""
    return plan.inputs if (plan := read_run_plan(folder)) else {}


def read_run_plan(folder: Path) -> RunPlan | None:
    """Read plan.json; None if the file is missing or damaged."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=RunPlan)
    return None
