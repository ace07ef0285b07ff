"""Clean up after the driver of a run was killed: end the run's processes and remove its shared memory.

Signals to process groups do not reach every process of a run. Each worker therefore watches its parent process and
exits with it (exit_when_process_ends). A small separate process, the reaper, watches the driver and kills all other
processes that the run has started on this machine, e.g. Ray's agents (start_reaper).
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ

RUN = "ALPHAAPOLLO_RUN"  # environment variable with the run's id, set in every process of a run
JOB_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # of job systems and closed terminals, treated as Ctrl-C
PR_SET_PDEATHSIG = 1
_REPEAT_SECONDS = 1.0  # a further signal within this time is ignored
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # for processes that end on their own
_REAP_SECONDS = 10.0  # maximum time to kill the processes of a run


_reserved_run_ids: list[str] = []


def reserve_run_id() -> str:
    """Return the id of the run that this process starts next, for processes that start before the run."""
    _reserved_run_ids[:] = [f"{os.getpid()}-{uuid.uuid4().hex[:8]}"]
    return _reserved_run_ids[0]


def new_run_id() -> str:
    """Return the id of a new run, and put it into the environment, which the run's processes inherit."""
    if not _reserved_run_ids:
        reserve_run_id()
    run_id = _reserved_run_ids.pop()
    os.environ[RUN] = run_id
    os.environ["PYTHONSAFEPATH"] = "1"  # entry_point also sets it, but a user's own loop does not use it
    os.environ["SPT_NOENV"] = "1"  # keeps Ray from overwriting the environment, which the reaper reads
    return run_id


@contextmanager
def treat_signals_as_ctrl_c() -> Iterator[None]:
    """Context manager that treats SIGTERM and SIGHUP (unless under nohup) as Ctrl-C.

    A second signal within a second is ignored: `timeout` and job systems signal a process and then its group. SIGINT is
    also handled in background jobs of shell scripts, which start with SIGINT ignored.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *JOB_SIGNALS)}
    last = -math.inf

    def interrupt(*_: object) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > _REPEAT_SECONDS:
            last = now
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in JOB_SIGNALS:
        if not (number == signal.SIGHUP and before[number] is signal.SIG_IGN):  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python


def exit_with_parent(parent_pid: int, signal_number: int) -> None:
    """Make the kernel send a signal to this process when its parent dies (Linux only). Exits if it has already died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent_pid:
            os._exit(0)


def list_child_pids(pid: int) -> list[int]:
    """Return the pids of a process's direct children; empty if the process has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while its file is read
        return []


def exit_when_process_ends(
    pid: int, cleanup_paths: Iterable[str | Path] = (), remove_shared_memory: bool = False
) -> None:
    """End this process with `os._exit(1)` as soon as process `pid` of this machine has ended. A daemon thread waits.

    Before the exit, it removes `cleanup_paths` and, with remove_shared_memory, the shared-memory files that it has
    mapped; set this only if no other process uses them.
    """
    paths = [Path(path) for path in cleanup_paths]

    def wait_and_exit() -> None:
        wait_for_exit(pid)
        remove_paths([*paths, *list_mapped_shared_memory()] if remove_shared_memory else paths)
        os._exit(1)

    threading.Thread(target=wait_and_exit, name=f"exit-with-{pid}", daemon=True).start()


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders, if they exist."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def list_mapped_shared_memory() -> list[Path]:
    """Return the shared-memory files that this process has mapped and that still exist."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {Path(field[5]) for field in fields if len(field) == 6}
    return [path for path in sorted(paths) if path.parent == Path("/dev/shm") and path.exists()]


def wait_for_exit(pid: int) -> None:
    """Block until process `pid` has ended; return at once if there is no such process."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_POLL_SECONDS)


def start_reaper(run_id: str, cleanup_paths: Iterable[str | Path]) -> None:
    """Start the reaper. After this process has ended, it kills every process of the run on this machine, and removes
    `cleanup_paths`."""
    command = make_module_command("alphaapollo.processes.watchdog", os.getpid(), run_id, *cleanup_paths)
    environment = {name: value for name, value in make_subprocess_environ().items() if name != RUN}
    subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)


def list_run_processes(run_id: str) -> list[int]:
    """Return the pids of the run's processes on this machine: those with its id in the environment variable `RUN`."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            if process.environ().get(RUN) == run_id:
                pids.append(process.pid)
    return pids


def kill_run_processes(run_id: str) -> None:
    """Kill every process of the run on this machine. Returns when none is left, or after 10 s."""
    end = time.monotonic() + _REAP_SECONDS
    while (left := list_run_processes(run_id)) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, *JOB_SIGNALS):  # these reach the whole job, and the driver may survive them
        signal.signal(ignored, signal.SIG_IGN)
    wait_for_exit(int(sys.argv[1]))
    time.sleep(_GRACE_SECONDS)
    kill_run_processes(sys.argv[2])
    remove_paths(map(Path, sys.argv[3:]))
