"""Clean-up after the driver of a run was killed: no process and no shared memory of the run remains.

Signals to process groups do not reach every process of a run. Each worker therefore watches the process that it works
for and exits with it (exit_with_process), and a small separate process watches the driver and ends everything else that
the run has started on this machine, e.g. Ray's agents (start_reaper).
"""

from __future__ import annotations

import os
import select
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

RUN = "ALPHAAPOLLO_RUN"  # environment variable with the run's id, in all processes that a run starts
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # for processes that end by themselves
_REAP_SECONDS = 10.0


def new_run_id() -> str:
    """Create the id of a new run and put it into the environment, which the run's processes inherit."""
    run_id = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    os.environ[RUN] = run_id
    os.environ["SPT_NOENV"] = "1"  # Ray's process titles would overwrite the environment that the reaper reads
    return run_id


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the block, handle SIGTERM and SIGHUP (unless under nohup) as Ctrl-C. SIGINT is handled even in background
    jobs of shell scripts, which start with it ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if before[signal.SIGHUP] is not signal.SIG_IGN:  # the terminal was closed
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python


def exit_with_process(
    pid: int, cleanup_paths: Iterable[str | Path] = (), own_shared_memory: bool = False
) -> threading.Thread:
    """End this process as soon as process `pid` of this machine has ended. Returns at once; a daemon thread waits, and
    ends the process by `os._exit(1)`.

    Args:
        cleanup_paths: files and folders to remove.
        own_shared_memory: also remove the shared memory that this process has mapped and shares with no other.
    """
    paths = [Path(path) for path in cleanup_paths]
    arguments = (pid, paths, own_shared_memory)
    thread = threading.Thread(target=_wait_and_exit, args=arguments, name=f"die-with-{pid}", daemon=True)
    thread.start()
    return thread


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders, if they exist."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def list_mapped_shared_memory() -> list[Path]:
    """Shared-memory files that this process has mapped and that still exist."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {Path(field[5]) for field in fields if len(field) == 6}
    return [path for path in sorted(paths) if path.parent == Path("/dev/shm") and path.exists()]


def _wait_and_exit(pid: int, paths: list[Path], own_shared_memory: bool) -> None:
    wait_for_exit(pid)
    remove_paths([*paths, *list_mapped_shared_memory()] if own_shared_memory else paths)
    os._exit(1)


def wait_for_exit(pid: int) -> None:
    """Block until process `pid` has ended; return at once if there is no such process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # no pidfd: an old kernel or a strict sandbox
        while psutil.pid_exists(pid):
            time.sleep(_POLL_SECONDS)
        return
    with open(descriptor, "rb", buffering=0) as watched:
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        poller.poll()


def start_reaper(run: str, cleanup_paths: Iterable[str | Path]) -> None:
    """Start a process that waits for the end of this one, kills every process on this machine with `RUN` set to `run`,
    and removes `cleanup_paths`."""
    command = [sys.executable, "-m", "alphaapollo.utils.watchdog", str(os.getpid()), run, *map(str, cleanup_paths)]
    environment = {name: value for name, value in os.environ.items() if name != RUN}
    subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)


def list_run_processes(run: str) -> list[int]:
    """pids of the processes of this user with `RUN` set to `run`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(RUN) == run:
                found.append(process.pid)
    return found


def kill_run_processes(run: str) -> None:
    """Kill every process on this machine with `RUN` set to `run`. Returns when none is left."""
    end = time.monotonic() + _REAP_SECONDS
    while (left := list_run_processes(run)) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _reap_run(driver: int, run: str, paths: list[Path]) -> None:
    wait_for_exit(driver)
    time.sleep(_GRACE_SECONDS)
    kill_run_processes(run)
    remove_paths(paths)


if __name__ == "__main__":
    _reap_run(int(sys.argv[1]), sys.argv[2], [Path(path) for path in sys.argv[3:]])
