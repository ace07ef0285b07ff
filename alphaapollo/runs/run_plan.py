"""plan.json of a run folder: the plan of the newest start, as it was printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from alphaapollo.data.findings import DataFinding
from alphaapollo.runs.input_digests import Digests
from alphaapollo.runs.record_files import read_records, write_records

PLAN = "plan.json"


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
    data: list[DataFinding] = field(default_factory=list)  # what the run does not read in its data


def write_run_plan(folder: Path, plan: RunPlan) -> None:
    write_records(folder / PLAN, [plan])


def read_run_plan(folder: Path) -> RunPlan | None:
    """Read plan.json; None if the file is missing or damaged."""
    return next(iter(read_records(folder / PLAN, RunPlan)), None)


def read_input_digests(folder: Path) -> Digests:
    """Read the digests of the inputs at the newest start."""
    return plan.inputs if (plan := read_run_plan(folder)) else {}
