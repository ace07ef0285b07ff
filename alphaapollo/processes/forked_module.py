"""Processes of a module, forked from a server that has imported it: they start in about 10 ms instead of half a second.

    first process that needs one --- server (imports the module) --- process, process, ...

The processes of a run on one machine have one server, whose address is an environment variable. It ends with the
process that started it. Unlike those of fork_server.py, the forked processes have imported nothing else, so they can
run a user's code, and they do not import the `__main__` of the process that asked for them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any, cast

import setproctitle

from alphaapollo.processes.python_command import make_subprocess_environ
from alphaapollo.processes.watchdog import exit_with_parent

SERVER = "ALPHAAPOLLO_MODULE_SERVER"  # environment variable with the key (_make_key) and the address of the server
_servers: dict[str, Any] = {}  # by key: started by this process; by key and address: named by the environment


@dataclass
class ForkedModule:
    """What a forked process does: call `main(arguments)` of a module."""

    module: str
    arguments: list[str]
    folder: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(default_factory=make_subprocess_environ)

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run in the forked process (called by multiprocessing), with the creator's socket as stdin and stdout."""
        os.setsid()  # Ctrl-C goes to the driver alone, and killpg reaches the children
        exit_with_parent(os.getppid(), signal.SIGKILL)
        channel, stderr = cast(list[int], forkserver.get_inherited_fds())
        for number, descriptor in enumerate((channel, channel, stderr)):
            os.dup2(descriptor, number)
        for descriptor in (channel, stderr, forkserver._forkserver._forkserver_alive_fd):  # type: ignore[attr-defined]
            os.close(descriptor)  # the last one keeps the server alive
        setproctitle.getproctitle()  # must run before the environment changes, so that the process can change its title
        os.environ.clear()
        os.environ.update(self.environment)
        setproctitle.setproctitle(f"{sys.executable} -m {self.module}")
        paths = self.environment["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        if random := sys.modules.get("numpy.random"):
            random.seed()  # Python's own generator does this itself
        os.chdir(self.folder)
        try:
            importlib.import_module(self.module).main(self.arguments)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


class ForkedHandle:
    """Handle of a forked process, with the attributes of asyncio.subprocess.Process that ProcessHost needs."""

    def __init__(self, status: int, pid: int, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter):
        self.pid, self.stdout, self.stdin = pid, stdout, stdin
        self.returncode: int | None = None
        self._has_ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(status, self._read_exit_code, status)

    def _read_exit_code(self, status: int) -> None:
        asyncio.get_running_loop().remove_reader(status)
        try:
            self.returncode = forkserver.read_signed(status)
        except EOFError:  # the server was killed, and the process with it
            self.returncode = -signal.SIGKILL
        os.close(status)
        self._has_ended.set()

    async def wait(self) -> int:
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode


async def fork_module(module: str, *arguments: str, reply_bytes: int) -> ForkedHandle:
    """Fork a process that calls `main(arguments)` of a module, with the environment and folder of this process.

    reply_bytes: limit of a line that it prints. Raises OSError or EOFError if the server cannot be started.
    """
    start, (own, other) = ForkedModule(module, [*arguments]), socket.socketpair()
    with other:
        server = _find_server(module)
        try:
            status, pid = await asyncio.to_thread(_request, server or start_server(module), start, other)
        except (OSError, EOFError):  # it has ended
            os.environ.pop(SERVER, None)
            status, pid = await asyncio.to_thread(_request, start_server(module), start, other)
    return ForkedHandle(status, pid, *await asyncio.open_connection(sock=own, limit=reply_bytes))


def start_server(module: str) -> Any:
    """Start the server of a module, unless this process has. It imports the module in the background."""
    server = _servers.setdefault(_make_key(module), forkserver.ForkServer())
    server.set_forkserver_preload([module])
    before = dict(os.environ)
    os.environ.update(make_subprocess_environ(), PYTHONSAFEPATH="1")
    server.ensure_running()
    os.environ.clear()
    os.environ.update(before)
    os.environ[SERVER] = _make_key(module) + server._forkserver_address
    return server


def stop_servers(folder: str) -> None:
    """Stop the servers that this process has started with a socket in `folder`, before the folder is removed."""
    for key, server in [*_servers.items()]:
        if server._forkserver_pid and server._forkserver_address.startswith(folder + os.sep):
            if os.environ.get(SERVER) == key + server._forkserver_address:
                del os.environ[SERVER]
            server._stop()
            del _servers[key]


def _find_server(module: str) -> Any | None:
    """Return the server of a module that the environment names, None without one."""
    found, key = os.environ.get(SERVER, ""), _make_key(module)
    if not found.startswith(key):
        return None
    if found not in _servers:
        server: Any = forkserver.ForkServer()
        server._forkserver_address, server._forkserver_alive_fd = found[len(key) :], os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = lambda: None
        _servers[found] = server
    return _servers[found]


def _make_key(module: str) -> str:
    """Return what distinguishes a module from that of another installation."""
    return f"{sys.executable}:{__file__}:{module}:"


def _request(server: Any, start: ForkedModule, channel: socket.socket) -> tuple[int, int]:
    """Ask a server for a process. Returns the descriptor from which its exit code can be read, and its pid. Waits until
    the server has imported the module."""
    status, data = server.connect_to_new_process([channel.fileno(), 2])
    try:
        with os.fdopen(data, "wb") as file:
            pickle.dump({}, file)  # what multiprocessing would prepare, e.g. import `__main__`
            pickle.dump(start, file)
        return status, forkserver.read_signed(status)
    except BaseException:
        os.close(status)
        raise
