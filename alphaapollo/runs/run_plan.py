"""Write and read plan.json of a run folder: the plan of the newest start, as it was printed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from alphaapollo.runs.input_digests import Digests
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.redaction import find_secret_variables, redact_values

FILE = "plan.json"


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
    with explain_write_errors("the plan", folder / FILE):
        folder.mkdir(parents=True, exist_ok=True)
        values = redact_values(msgspec.to_builtins(plan), find_secret_variables())
        replace_file(folder / FILE, [msgspec.json.encode(values)])


def read_input_digests(folder: Path) -> Digests:
    """Read the digests of the inputs at the newest start; empty if an earlier version started the run."""
    return plan.inputs if (plan := read_run_plan(folder)) else {}


def read_run_plan(folder: Path) -> RunPlan | None:
    """Read plan.json; None if the file is missing or damaged."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode((folder / FILE).read_bytes(), type=RunPlan)
    return None
