"""Write and read what a run folder says about its commands:

    metrics.jsonl    one line per iteration with numbers named `group/name`, e.g. `critic/score/mean`
    history.jsonl    one line per command that has worked in the folder, when it ends
    plan.json        the plan of the newest start as it was printed
    status.json      what the running command does, rewritten every few seconds and removed at its end
    examples.jsonl   the first examples that a fine-tuning run trains on, one JSON line each:

    {"data_source": "maths", "margin": 0.0, "rows": [{"label": "chosen", "ref_logp": -3.2,
                                                      "parts": [[4, false, "7 + 7?"], [2, true, "14<|im_end|>"]]}, ...]}

A part is a run of tokens that are all trained on, or all not: number of tokens, whether they are trained on, text.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec

from alphaapollo.data.findings import DataFinding
from alphaapollo.runs.input_digests import Digests
from alphaapollo.types import Row
from alphaapollo.utils.disk import explain_write_errors, read_small_file, replace_file
from alphaapollo.utils.json_types import finite_or_none
from alphaapollo.utils.redaction import find_secret_variables, redact, redact_values
from alphaapollo.utils.versions import find_commit, list_versions

HISTORY, PLAN, STATUS, EXAMPLES = "history.jsonl", "plan.json", "status.json", "examples.jsonl"
PACKAGES = ("alphaapollo", "torch", "vllm", "sglang", "transformers", "ray")
NUM_LOGGED = 32  # examples
MAX_RECORDS = 64 << 20  # bytes of a file
T = TypeVar("T")


@dataclass(frozen=True)
class CommandRecord:
    """A command that has worked in a run folder. Times are in seconds since 1970."""

    command: str
    started: float
    ended: float
    state: str  # finished, failed or interrupted
    error: str  # why it failed; otherwise empty
    versions: dict[str, str]  # installed packages, and the commit of alphaapollo


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


@dataclass(frozen=True)
class RunStatus:
    """What a running command does. Times are in seconds since 1970."""

    phase: str = ""  # e.g. generate
    detail: str = ""  # e.g. 12/32, or the called workers
    since: float = 0.0  # start of the phase in this iteration
    written: float = 0.0
    step: int = 0  # completed iterations
    tokens: int = 0  # sampled in the running iteration, by groups that have finished
    expected_tokens: float = 0.0  # of the running iteration; 0: unknown
    seconds_left: float | None = None  # None: unknown
    pid: int = 0


class ExampleRow(msgspec.Struct, frozen=True):
    """Token sequence of an example."""

    parts: list[tuple[int, bool, str]]  # number of tokens, whether they are trained on, text
    label: str = ""  # chosen, rejected, desirable or undesirable; empty for SFT
    ref_logp: float | None = None  # summed log-prob of the trained tokens under the reference model, in nats


class LoggedExample(msgspec.Struct, frozen=True):
    """Example of a fine-tuning run: one sequence (SFT, KTO), or a pair."""

    rows: list[ExampleRow]
    data_source: str = ""
    margin: float = 0.0  # margin of the chosen over the rejected response, from the data


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


def make_example_row(row: Row, decode: Callable[[Sequence[int]], str]) -> ExampleRow:
    """Describe a token sequence. decode: returns the text of tokens, with special tokens."""
    parts = []
    for is_trained, group in groupby(zip(row.action_mask, row.token_ids, strict=True), key=lambda pair: bool(pair[0])):
        ids = [token_id for _, token_id in group]
        parts.append((len(ids), is_trained, decode(ids)))
    return ExampleRow(parts)


def write_run_plan(folder: Path, plan: RunPlan) -> None:
    _write_records(folder / PLAN, [plan])


def write_examples(folder: Path, examples: Iterable[LoggedExample]) -> None:
    _write_records(folder / EXAMPLES, examples)


def write_run_status(folder: Path, status: RunStatus) -> None:
    """Write status.json. Raises OSError, also if the folder does not exist yet."""
    replace_file(folder / STATUS, [msgspec.json.encode(status)])


def read_run_status(folder: Path) -> RunStatus | None:
    """Read status.json; None if the file is missing or damaged."""
    return next(iter(_read_records(folder / STATUS, RunStatus)), None)


def read_history(folder: Path) -> list[CommandRecord]:
    """Read the history of a run folder, oldest command first. Damaged lines are skipped."""
    return _read_records(folder / HISTORY, CommandRecord)


def read_run_plan(folder: Path) -> RunPlan | None:
    """Read plan.json; None if the file is missing or damaged."""
    return next(iter(_read_records(folder / PLAN, RunPlan)), None)


def read_input_digests(folder: Path) -> Digests:
    """Read the digests of the inputs at the newest start."""
    return plan.inputs if (plan := read_run_plan(folder)) else {}


def read_examples(folder: Path) -> list[LoggedExample]:
    """Read examples.jsonl. Damaged lines are skipped."""
    return _read_records(folder / EXAMPLES, LoggedExample)


def _write_records(path: Path, records: Iterable[object]) -> None:
    """Write one JSON line per record, with secrets redacted. Raises OSError if the file cannot be written."""
    known = find_secret_variables()
    lines = (msgspec.json.encode(redact_values(msgspec.to_builtins(record), known)) + b"\n" for record in records)
    with explain_write_errors("the description of the run", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lines)


def _read_records(path: Path, kind: type[T]) -> list[T]:
    """Read the lines of a file; empty if the file is missing or no small file. Damaged lines are skipped."""
    records = list[T]()
    with suppress(OSError):
        for line in read_small_file(path, MAX_RECORDS).splitlines():
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                records.append(msgspec.json.decode(line, type=kind))
    return records


class JsonlTracker:
    """Tracker that writes metrics.jsonl. A line is on disk when `log` returns.

    Values are finite floats or null: `{"step": 3, "critic/score/mean": 0.5, "kl/mean": null}`.
    """

    def __init__(self, path: Path, resumed_step: int, notice: Callable[[str], None] = print):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for text in _remove_lines_after(path, resumed_step):
                notice(text)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        os.fsync(self._file.fileno())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with explain_write_errors("the metrics", self._path):
            self._file.write(json.dumps(make_metrics_record(step, metrics), allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _remove_lines_after(path: Path, step: int) -> list[str]:
    """Remove lines of metrics.jsonl that cannot be parsed or belong to iterations after the resumed one, `step`. 0 (a
    new run) removes all lines. Returns a notice about lines that cannot be parsed, except an unfinished last line."""
    lines = path.read_bytes().splitlines(keepends=True) if step else []
    steps = [_parse_step(line) for line in lines]
    replace_file(path, [line for line, own in zip(lines, steps, strict=True) if own is not None and own <= step])
    damaged = [str(number) for number, own in enumerate(steps, 1) if own is None and lines[number - 1].endswith(b"\n")]
    return [f"{path}: lines {', '.join(damaged)} cannot be parsed and were removed."] if damaged else []


def read_logged_steps(path: Path) -> list[int]:
    """Return the iterations in a metrics.jsonl; empty if there is no file. Raises OSError if it cannot be read."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [step for line in lines if (step := _parse_step(line)) is not None]


def _parse_step(line: bytes) -> int | None:
    """Return the iteration of a line of metrics.jsonl, or None if the line is invalid."""
    with suppress(ValueError, TypeError, KeyError):
        return int(json.loads(line)["step"])
    return None


def make_metrics_record(step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Build a line of metrics.jsonl: the step, then every metric as a finite float or null.

    >>> make_metrics_record(3, {"critic/score/mean": 0.5, "kl/mean": float("nan")})
    {'step': 3, 'critic/score/mean': 0.5, 'kl/mean': None}
    """
    record: dict[str, float | None] = {"step": step}
    for name, value in metrics.items():
        assert "/" in name, f"metric {name!r} has no group. Use a name group/name"
        record[name] = finite_or_none(value)
    return record
