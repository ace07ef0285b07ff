"""Runner of the acceptance checks (scripts/gpu_check, scripts/cluster_check).

Each check runs in a separate process with a deadline. It writes each measurement to measurements.jsonl at once, so a
check that is stopped keeps its measurements. table.md and report.json are written again after each check. A check that
cannot run on a machine is reported as untested, never as passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

ROOT = Path(__file__).resolve().parents[1]
# Files of all checks, in the folder of the results.
MEASUREMENTS, LOG, REPORT = "measurements.jsonl", "log.txt", "report.json"
POLL_SECONDS = 0.2
Status = Literal["passed", "failed", "untested"]


class Untested(Exception):
    """Raised if the machine lacks a requirement of a check, which the message names."""


@dataclass(frozen=True)
class Outcome:
    name: str
    status: Status
    seconds: float
    measurements: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    expected: dict[str, list[Any]] = field(default_factory=dict)  # measurement: [lowest, highest, source]


def record(out: Path, check: str, measurement: str, value: Any) -> None:
    """Append a measurement of a check to out/measurements.jsonl."""
    _append(out, {"check": check, "measurement": measurement, "value": value})


def expect(out: Path, check: str, expected: Mapping[str, Sequence[Any]]) -> None:
    """Append the expected values of a check, {measurement: (lowest, highest, source)}, before it runs."""
    _append(out, {"check": check, "expected": expected})


def child(name: str, check: Callable[[], None], out: Path) -> NoReturn:
    """Run one check in this process and write its status; a failed check ends the process with a traceback."""
    try:
        check()
        end = {"check": name, "status": "passed"}
    except Untested as missing:
        end = {"check": name, "status": "untested", "reason": str(missing)}
    _append(out, end)
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads


def _append(out: Path, line: Mapping[str, Any]) -> None:
    with (out / MEASUREMENTS).open("a") as file:
        file.write(json.dumps(line) + "\n")


class MeasurementReader:
    """Reads the lines that a check appends to measurements.jsonl, and prints each measurement."""

    def __init__(self, out: Path):
        self._path, self._position = out / MEASUREMENTS, _size(out / MEASUREMENTS)
        self.measurements: dict[str, Any] = {}
        self.expected: dict[str, list[Any]] = {}
        self.end: dict[str, Any] = {}  # last line of a check that was not stopped

    def read(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in map(json.loads, complete.splitlines()):
            if "status" in line:
                self.end = line
            elif "expected" in line:
                self.expected |= line["expected"]
            else:
                name = line["measurement"]
                self.measurements[name] = line["value"]
                print(f"    {_format(name, line['value'], self.expected.get(name))}", flush=True)


def run_check(name: str, command: Sequence[str], out: Path, deadline: float) -> Outcome:
    """Run `command`, which calls `child`, and end all processes of its session. Its output goes to out/log.txt."""
    reader, log, start = MeasurementReader(out), out / LOG, time.monotonic()
    with log.open("a") as file:
        print(f"== {name}", file=file, flush=True)
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            while (ended := process.poll()) is None and time.monotonic() - start < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                reader.read()
        finally:
            kill_session(process)
    reader.read()
    seconds = time.monotonic() - start
    if reader.end:
        status, reason = reader.end["status"], reader.end.get("reason", "")
        return Outcome(name, status, seconds, reader.measurements, reason, reader.expected)
    output = log.read_text(errors="replace").rpartition(f"== {name}\n")[2]
    why = last_line(output) or f"exited with status {ended}"
    if ended is None:
        why = f"took more than {deadline:.0f} s"
    return Outcome(name, "failed", seconds, reader.measurements, f"{why} ({log})", reader.expected)


def run_all(
    texts: Mapping[str, str],
    out: Path,
    run: Callable[[str], Outcome],
    title: str,
    summarize: Callable[[list[Outcome]], dict[str, Any]] = lambda _: {},
) -> int:
    """Run the checks one after the other, and write out/table.md and out/report.json after each one. Results of other
    checks in `out` are kept. Returns 1 if a check failed. texts: {name of a check: description}. summarize: further
    entries of report.json beside the outcomes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes of the current check
    out.mkdir(parents=True, exist_ok=True)
    report = out / REPORT
    earlier = json.loads(report.read_text())["checks"] if report.is_file() else []
    outcomes = {one["name"]: Outcome(**one) for one in earlier}
    for name, text in texts.items():
        print(f"{name}: {text} ...", flush=True)
        outcome = outcomes[name] = run(name)
        print(f"    {outcome.status} in {outcome.seconds:.0f} s {outcome.reason}", flush=True)
        done = list(outcomes.values())
        (out / "table.md").write_text(table(done, title))
        entries = {**summarize(done), "checks": [asdict(one) for one in done]}
        report.write_text(json.dumps(entries, indent=1) + "\n")
    print(table(list(outcomes.values()), title))
    return int(any(outcomes[name].status == "failed" for name in texts))


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
        measurements = ", ".join(
            _format(name, value, one.expected.get(name)) for name, value in one.measurements.items()
        )
        results = "; ".join(part for part in (one.reason, measurements) if part).replace("|", "\\|")
        lines.append(f"| {one.name} | **{one.status}** | {one.seconds:.0f} | {results} |")
    return "\n".join(lines) + "\n"


def _format(name: str, value: Any, expected: Sequence[Any] | None = None) -> str:
    text = f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
    return f"{text} (expected {format_range(*expected[:2])}: {expected[2]})" if expected else text


def format_range(lowest: float, highest: float) -> str:
    return " to ".join(dict.fromkeys(map(format_number, (lowest, highest))))


def format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
