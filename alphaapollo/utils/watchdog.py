"""No process outlives the run that started it, and no shared memory does.

A driver that is killed cannot clean up, and signals to process groups do not reach everyone. So each process watches
the one that it works for and leaves when that one is gone (die_with), and a small process of its own watches the
driver and ends what else the run has started on this machine: Ray's agents, for one (start_reaper).
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

RUN = "ALPHAAPOLLO_RUN"  # environment variable of all processes that a run starts: its id
_POLL_SECONDS = 0.2  # only where the kernel has no pidfd
_GRACE_SECONDS = 2.0  # who ends by itself may
_REAP_SECONDS = 10.0


def name_run() -> str:
    """A new run's id. Every process that it starts inherits it, or it is a process of another run."""
    run_id = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    os.environ[RUN] = run_id
    os.environ["SPT_NOENV"] = "1"  # Ray renames its processes, over their environment if it may: the reaper reads that
    return run_id


@contextmanager
def ends_when_told() -> Iterator[None]:
    """In the block SIGTERM, and SIGHUP but under nohup, end this process as Ctrl-C does, which reaches it in any case:
    a shell script's background jobs start deaf to SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if before[signal.SIGHUP] is not signal.SIG_IGN:  # the terminal is gone
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not of Python's making


def die_with(pid: int, cleanup_paths: Iterable[str | Path] = (), own_shared_memory: bool = False) -> threading.Thread:
    """End this process as soon as process `pid` has ended, after removing `cleanup_paths` (files or folders).

    `own_shared_memory`: remove the shared memory that this process has mapped, too; for processes that share it with
    nobody who lives on. Returns at once; a daemon thread waits. It ends the process without unwinding (`os._exit(1)`):
    whoever was to receive an error is dead. `pid` must live on this machine and in this process namespace.
    """
    paths = [Path(path) for path in cleanup_paths]
    arguments = (pid, paths, own_shared_memory)
    thread = threading.Thread(target=_wait_and_exit, args=arguments, name=f"die-with-{pid}", daemon=True)
    thread.start()
    return thread


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders; what is already gone is fine."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def mapped_shared_memory() -> list[Path]:
    """The shared-memory files that this process has mapped and that still have a name."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {Path(field[5]) for field in fields if len(field) == 6}
    return [path for path in sorted(paths) if path.parent == Path("/dev/shm") and path.exists()]


def _wait_and_exit(pid: int, paths: list[Path], own_shared_memory: bool) -> None:
    wait_for_exit(pid)
    remove_paths([*paths, *mapped_shared_memory()] if own_shared_memory else paths)
    os._exit(1)


def wait_for_exit(pid: int) -> None:
    """Block until process `pid` has ended (at once if there is none)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel or a strict sandbox
        while _exists(pid):
            time.sleep(_POLL_SECONDS)
        return
    with open(descriptor, "rb", buffering=0) as watched:
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        poller.poll()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def start_reaper(run: str, cleanup_paths: Iterable[str | Path]) -> None:
    """Watch this process from one of its own; when it has ended, however it did, kill every process on this machine
    that has `RUN` set to `run` in its environment, and remove `cleanup_paths`."""
    command = [sys.executable, "-m", "alphaapollo.utils.watchdog", str(os.getpid()), run, *map(str, cleanup_paths)]
    environment = {name: value for name, value in os.environ.items() if name != RUN}
    subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)


def processes_of_run(run: str) -> list[int]:
    """The pids of a run's processes that we may see."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or another user's
                continue
            if f"{RUN}={run}".encode() in environment:
                found.append(int(entry.name))
    return found


def end_processes(run: str) -> None:
    """Kill every process on this machine that has `RUN` set to `run`; returns when there is none any more."""
    end = time.monotonic() + _REAP_SECONDS
    while (left := processes_of_run(run)) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _reap(driver: int, run: str, paths: list[Path]) -> None:
    wait_for_exit(driver)
    time.sleep(_GRACE_SECONDS)
    end_processes(run)
    remove_paths(paths)


if __name__ == "__main__":
    _reap(int(sys.argv[1]), sys.argv[2], [Path(path) for path in sys.argv[3:]])
