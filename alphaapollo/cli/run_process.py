"""Run a command as a child process for the Python API: print its output, and call back after each iteration.

In a separate process, the run does not interfere with the event loop, memory and signal handlers of a notebook.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from alphaapollo.processes.host import make_subprocess_environ
from alphaapollo.processes.watchdog import exit_when_process_ends, treat_signals_as_ctrl_c

OnIteration = Callable[[int, dict[str, float]], None]
"""Callback that receives the step and the metrics of an iteration."""

POLL_SECONDS = 0.2
END_SECONDS = 60.0  # timeout of an interrupted run, which may write a checkpoint
KEPT_LINES = 200  # number of newest output lines to keep for the error message
REFUSED, INTERRUPTED = 2, 130


class RunFailed(RuntimeError):
    """A run failed after its start. The message is the end of the run's output."""


def run_in_child_process(
    module: str, arguments: Sequence[str], run_folder: Path, on_iteration: OnIteration | None, show: bool
) -> None:
    """Run `python -m module arguments` in a child process and wait for its end; `show` prints its output.

    Raises:
        ValueError: The configuration or the data is invalid; the run did not start. The message is the run's error.
        RunFailed: The run failed.
        KeyboardInterrupt: Ctrl-C in this process or in the run. The run is stopped first, as after an exception in
            `on_iteration`.
    """
    command = [sys.executable, "-m", "alphaapollo.cli.run_process", str(os.getpid()), module, *arguments]
    metrics_lines = AppendedLineReader(run_folder / "metrics.jsonl")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=make_subprocess_environ() | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # this process receives Ctrl-C and forwards it
    )
    assert process.stdout is not None
    kept_lines: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_read_output, args=(process.stdout, kept_lines, show), daemon=True)
    reader.start()
    try:
        _report_iterations(process, metrics_lines, on_iteration)
    except BaseException:
        _stop_process(process)
        raise
    reader.join()
    if process.returncode == REFUSED:
        raise ValueError(_extract_error(kept_lines))
    if process.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if process.returncode:
        raise RunFailed(_extract_error(kept_lines))


def _report_iterations(
    process: subprocess.Popen[str], metrics_lines: AppendedLineReader, on_iteration: OnIteration | None
) -> None:
    """Call `on_iteration` for each new line of metrics.jsonl until the process has ended."""
    while True:
        try:
            ended = process.wait(POLL_SECONDS) is not None
        except subprocess.TimeoutExpired:
            ended = False
        for line in metrics_lines.read_new_lines() if on_iteration else ():
            record = json.loads(line)
            on_iteration(int(record.pop("step")), record)  # type: ignore[misc]
        if ended:
            return


def _stop_process(process: subprocess.Popen[str]) -> None:
    """Send SIGINT to the run, and kill it after a timeout or a second Ctrl-C. Its child processes end with it."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(END_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def _read_output(pipe: IO[str], kept_lines: deque[str], show: bool) -> None:
    for line in pipe:
        kept_lines.append(line.rstrip("\n"))
        if show:
            print(line, end="", flush=True)


def _extract_error(output_lines: Sequence[str]) -> str:
    """Return the output from the last line that starts with `error` or e.g. `3 errors`; else the last 20 lines."""
    lines = list(output_lines)
    starts = [i for i, line in enumerate(lines) if line.lstrip("0123456789 ").startswith("error")]
    return "\n".join(lines[starts[-1] :] if starts else lines[-20:]).removeprefix("error: ")


class AppendedLineReader:
    """Reader of the lines that a run adds to its metrics.jsonl. A resume may rewrite it with fewer lines."""

    def __init__(self, path: Path):
        self._path, self._file, self._position, self._known = path, 0, 0, set[str]()
        self.read_new_lines()

    def read_new_lines(self) -> list[str]:
        """Return the complete lines that are new since the last call. Reads only what was added."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._position:  # a resume has rewritten it
                self._file, self._position = status.st_ino, 0
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        new = [line for line in complete.decode().splitlines() if line not in self._known]
        self._known.update(new)
        return new


if __name__ == "__main__":  # the run's process: PARENT_PID MODULE WORD...
    exit_when_process_ends(int(sys.argv[1]))  # ends the run if the parent, e.g. a notebook kernel, is killed
    with treat_signals_as_ctrl_c():
        sys.exit(importlib.import_module(sys.argv[2]).main(sys.argv[3:]))
