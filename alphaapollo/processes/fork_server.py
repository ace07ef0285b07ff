"""Processes forked from one parent, the fork server, which has imported large libraries: they start in a tenth of a
second instead of ten.

    this process --- fork server (imports modules once) --- process, process, ...

A driver may start its workers' fork server (`share_fork_server`) early, to import while the driver checks its inputs.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import psutil
import setproctitle

from alphaapollo.processes.watchdog import RUN, reserve_run_id

SHARED = "ALPHAAPOLLO_FORK_SERVER"  # environment variable with the pid and the address of a shared fork server
_inherited_modules: frozenset[str] = frozenset()
"""Modules that the fork server had imported when it forked this process; empty: this process was not forked."""


class ForkedProcess(ForkServerProcess):
    """Process forked from the fork server, with the environment variables of the process that creates it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        global _inherited_modules
        _inherited_modules = frozenset(sys.modules)
        setproctitle.getproctitle()  # must run before the environment changes, so that the process can change its title
        os.environ.clear()
        os.environ.update(self._environment)
        self.set_up()
        super().run()

    def set_up(self) -> None:
        """Prepare the new process before its target is called."""


class ForkedContext(ForkServerContext):
    """Multiprocessing context of processes that are forked from the fork server."""

    Process = ForkedProcess


def start_fork_server(preload: str, provided: Sequence[str], shared: Mapping[str, str] | None = None) -> None:
    """Start the fork server, which imports the module `preload` in the background with the current environment
    variables.

    provided: modules that `preload` imports. A process whose own fork server has imported them forks its children from
        that server.
    shared: use the shared fork server instead, if it has these environment variables; None: do not use it.
    """
    server: Any = multiprocessing.forkserver._forkserver
    server.set_forkserver_preload([preload])
    if _inherited_modules.issuperset(provided):
        multiprocessing.forkserver.ensure_running = server.ensure_running = lambda: None  # it is running
    elif shared is None or not use_shared_server(shared):
        _launch(server)


def _launch(server: Any) -> None:
    path_before = os.environ.get("PYTHONPATH")  # Python 3.11 does not pass sys.path to the fork server
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    server.ensure_running()
    if path_before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path_before


@contextmanager
def share_fork_server(
    preload: Sequence[str], provided: Sequence[str], environment: Mapping[str, str]
) -> Iterator[None]:
    """Context manager that starts a fork server with these environment variables (see `start_fork_server`) for this
    process's workers on this machine. The server belongs to the run that starts next, and is killed at the end. It
    blocks SIGINT until `preload` unblocks the signal, because a Ctrl-C would interrupt imports with a traceback."""
    if _inherited_modules.issuperset(provided):
        own: Any = multiprocessing.forkserver._forkserver
        os.environ[SHARED] = f"{os.getppid()} {own._forkserver_address}"
        try:
            yield
        finally:
            os.environ.pop(SHARED, None)
        return
    environment_before, server = dict(os.environ), multiprocessing.forkserver.ForkServer()
    server.set_forkserver_preload(list(preload))
    os.environ.update(environment, **{RUN: reserve_run_id()})
    resource_tracker.ensure_running()  # its start unblocks SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _launch(server)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ.clear()
    os.environ.update(environment_before)
    pid, address = server._forkserver_pid, server._forkserver_address  # type: ignore[attr-defined]
    os.environ[SHARED] = f"{pid} {address}"
    try:
        yield
    finally:
        os.environ.pop(SHARED, None)
        os.close(server._forkserver_alive_fd)  # type: ignore[attr-defined]
        with suppress(ChildProcessError):  # the run has already killed the server
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)  # it may still be importing
                os.waitpid(pid, 0)


def use_shared_server(environment: Mapping[str, str]) -> bool:
    """Let this process fork from the shared fork server, if there is one with these variables. If that server dies,
    the next fork starts a server of this process. Returns whether there is such a server."""
    server: Any = multiprocessing.forkserver._forkserver
    pid, _, address = os.environ.get(SHARED, "0 ").partition(" ")
    try:
        missing_variables = environment.items() - psutil.Process(int(pid)).environ().items()
    except psutil.Error:  # the server has died, or is on another machine
        return False
    if not address or missing_variables:
        return False
    launch = server.ensure_running

    def ensure_running() -> None:
        if not os.path.exists(f"/proc/{pid}/exe"):
            multiprocessing.forkserver.ensure_running = server.ensure_running = launch
            launch()

    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    multiprocessing.forkserver.ensure_running = server.ensure_running = ensure_running
    return True
