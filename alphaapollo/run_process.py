"""Run a command as a child process, so that it does not interfere with a notebook. For the Python API and sweeps."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from alphaapollo.processes.entry_point import run_program
from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ
from alphaapollo.processes.watchdog import exit_when_process_ends, treat_signals_as_ctrl_c

OnIteration = Callable[[int, dict[str, float]], None]
"""Callback that receives the step and the metrics of an iteration."""

POLL_SECONDS = 0.2
END_SECONDS = 60.0  # maximum wait for the end of an interrupted run, which may write a checkpoint first
KEPT_LINES = 200  # number of newest output lines to keep for the error message
REFUSED, INTERRUPTED = 2, 130  # exit codes of a run


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
    read_new_metrics = make_metrics_reader(run_folder / "metrics.jsonl")
    process = start_run_process(module, arguments, subprocess.PIPE)
    output: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_read_output, args=(process.stdout, output, show), daemon=True)
    reader.start()
    try:
        has_ended = False
        while not has_ended:
            with suppress(subprocess.TimeoutExpired):
                has_ended = process.wait(POLL_SECONDS) is not None
            if on_iteration:
                for metrics in read_new_metrics():
                    on_iteration(int(metrics.pop("step")), metrics)
    except BaseException:
        stop_run_processes([process])
        raise
    reader.join()
    if process.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if process.returncode:
        error = find_error([*output])
        raise ValueError(error) if process.returncode == REFUSED else RunFailed(error)


def start_run_process(
    module: str, arguments: Sequence[str], output: int | IO[str] | IO[bytes], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a run that ends with this process. output: receives stdout and stderr. variables: environment variables."""
    return subprocess.Popen(
        make_module_command("alphaapollo.run_process", os.getpid(), module, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=make_subprocess_environ() | {"PYTHONUNBUFFERED": "1"} | dict(variables or {}),
        start_new_session=True,  # this process receives Ctrl-C and forwards it
    )


def stop_run_processes(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Stop runs as Ctrl-C does, and wait for their end. Kills them after END_SECONDS, or after a second Ctrl-C."""
    with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait(END_SECONDS)
    for process in processes:
        process.kill()  # its child processes end with it
        process.wait()


def find_error(output: Sequence[str]) -> str:
    """Return the error at the end of a run's output, or its last 20 lines if it has none."""
    starts = [i for i, line in enumerate(output) if line.lstrip("0123456789 ").startswith("error")]
    return "\n".join(output[starts[-1] if starts else -20 :]).removeprefix("error: ")


def _read_output(pipe: IO[str], kept_lines: deque[str], show: bool) -> None:
    for line in pipe:
        kept_lines.append(line.rstrip("\n"))
        if show:
            print(line, end="", flush=True)


def make_metrics_reader(path: Path) -> Callable[[], list[dict[str, float]]]:
    """Return a function that reads the records that were added to a metrics.jsonl since its last call. A resume may
    replace the file by one with fewer lines."""
    earlier_lines, last_version = set[bytes](), (0, 0)

    def read_new_metrics() -> list[dict[str, float]]:
        nonlocal last_version
        if not path.is_file():
            return []
        stat = path.stat()
        if (version := (stat.st_mtime_ns, stat.st_size)) == last_version:
            return []
        last_version, lines = version, path.read_bytes().splitlines(keepends=True)
        new_lines = [line for line in lines if line.endswith(b"\n") and line not in earlier_lines]
        earlier_lines.update(new_lines)
        return [json.loads(line) for line in new_lines]

    read_new_metrics()  # skips the records of earlier runs
    return read_new_metrics


if __name__ == "__main__":  # a run's process, with the arguments PARENT_PID MODULE WORD...
    exit_when_process_ends(int(sys.argv[1]))  # ends the run if the parent, e.g. a notebook kernel, is killed
    with treat_signals_as_ctrl_c():
        run_program(lambda: importlib.import_module(sys.argv[2]).main(sys.argv[3:]))
