"""Runner of the acceptance checks (scripts/gpu_check, scripts/cluster_check).

Each check runs in a separate process with a deadline. The results are one table and one JSON file. A check that cannot
run on a machine is reported as untested, never as passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

ROOT = Path(__file__).resolve().parents[1]
Status = Literal["passed", "failed", "untested"]


class Untested(Exception):
    """Raised if the machine lacks a requirement of a check, which the message names."""


@dataclass(frozen=True)
class Outcome:
    name: str
    status: Status
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def child(check: Callable[[], dict[str, Any]], answer: Path) -> NoReturn:
    """Run one check in this process and write its outcome; a failed check ends the process with a traceback."""
    try:
        said: dict[str, Any] = {"status": "passed", "figures": check()}
    except Untested as missing:
        said = {"status": "untested", "reason": str(missing)}
    answer.write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads


def run_check(name: str, command: Sequence[str], out: Path, deadline: float) -> Outcome:
    """Run `command`, which calls `child` with out/NAME.json, and end all processes of its session."""
    answer, log = out / f"{name}.json", out / f"{name}.log"
    answer.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadline)
        ended = process.poll()
        kill_session(process)
    seconds = time.monotonic() - start
    if not answer.is_file():
        why = (
            f"took more than {deadline:.0f} s"
            if ended is None
            else last_line(log.read_text(errors="replace")) or f"exited with status {ended}"
        )
        return Outcome(name, "failed", seconds, reason=f"{why} ({log})")
    said = json.loads(answer.read_text())
    return Outcome(name, said["status"], seconds, said.get("figures", {}), said.get("reason", ""))


def run_all(texts: Mapping[str, str], out: Path, run: Callable[[str], Outcome]) -> list[Outcome]:
    """Run all checks one after the other, with output in an empty `out`. texts: {name of a check: description}."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    outcomes = []
    for name, text in texts.items():
        print(f"{name}: {text} ...", flush=True)
        outcomes.append(run(name))
        print(f"    {outcomes[-1].status} in {outcomes[-1].seconds:.0f} s {outcomes[-1].reason}", flush=True)
    return outcomes


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process of the check and all other processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(text: str) -> str:
    """Last line that is not blank, or an empty string."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def table(outcomes: list[Outcome], title: str) -> str:
    lines = [f"# {title}", "", "| check | | seconds | results |", "|---|---|---|---|"]
    for one in outcomes:
        figures = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in one.figures.items())  # fmt: skip
        lines.append(f"| {one.name} | **{one.status}** | {one.seconds:.0f} | {one.reason or figures} |")
    return "\n".join(lines) + "\n"


def report(outcomes: list[Outcome], title: str, out: Path) -> int:
    """Write out/table.md and out/result.json, print the table, and return 1 if a check failed."""
    (out / "table.md").write_text(table(outcomes, title))
    (out / "result.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    print(table(outcomes, title))
    return int(any(one.status == "failed" for one in outcomes))
