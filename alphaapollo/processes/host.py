"""Child process that answers requests: start, request, reply, time limit, kill and death in one place.

    host = await ProcessHost.start(command, environ)    or ProcessHost.fork(module, *arguments)
    report = await host.read_first_reply(timeout)       reply 0, if the process replies before any request
    reply = await host.request(payload, timeout)        request: a line with its number, and the payload

A reply is a line with the number of its request, and text that the owner decodes: JSON if the process handles untrusted
data. Requests may overlap if the process can serve several at once. The process and its process group are killed after
a timeout and by `kill`, and end with this process. The module is used for graders (rewards/grader_processes/), agents'
programs (rollout/agents/programs.py) and engines in processes of their own (engines/remote.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from io import BufferedReader
from typing import BinaryIO

from alphaapollo.processes.forked_module import ForkedHandle, fork_module

EXIT_GRACE = 1.0  # seconds between the end of a process's output and its exit
READ_GRACE = 0.05  # seconds to read a reply that arrived while the event loop was blocked
MAX_REPLY = 1 << 30  # bytes of a reply


class ProcessError(ValueError):
    """Error for a child process that did not reply in time, died, or did not start."""


class ProcessTimeoutError(ProcessError):
    """Error for a child process that did not reply in time. A second attempt would take as long."""


class ProcessDiedError(ProcessError):
    """Error for a child process that crashed or was killed from outside."""


class ProcessHost:
    """Handle of a child process that answers requests. The process is dead once a method raises ProcessError."""

    def __init__(self, handle: asyncio.subprocess.Process | ForkedHandle):
        self._handle = handle
        self._waiting: dict[int, asyncio.Future[bytes]] = {0: asyncio.get_running_loop().create_future()}
        self._count = 0
        self._reading = asyncio.create_task(self._read_replies())

    @classmethod
    async def start(
        cls, command: Sequence[str], environ: Mapping[str, str], stderr: BinaryIO | None = None
    ) -> ProcessHost:
        """Start a process that calls reserve_stdin_and_stdout. stderr: file for the process's stderr; None:
        stderr of this process. Raises OSError."""
        handle = await asyncio.create_subprocess_exec(
            *command,
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            limit=MAX_REPLY,
            start_new_session=True,  # Ctrl-C goes to the driver alone, and killpg reaches the children
        )
        return cls(handle)

    @classmethod
    async def fork(cls, module: str, *arguments: object) -> ProcessHost:
        """Fork a process that calls `main(arguments)` of a module, which calls reserve_stdin_and_stdout (see
        forked_module.py). Raises OSError, and ProcessDiedError if the module cannot be imported."""
        try:
            return cls(await fork_module(module, *map(str, arguments), reply_bytes=MAX_REPLY))
        except (EOFError, ConnectionError) as error:  # its server has ended
            raise ProcessDiedError(f"{module} cannot be imported in a process of its own") from error

    async def read_first_reply(self, timeout: float) -> bytes:
        """Wait until the process is ready. Returns its first reply. Raises ProcessError."""
        return await self._wait(0, self._waiting[0], timeout, READ_GRACE)

    async def request(self, payload: bytes, timeout: float, grace: float = READ_GRACE) -> bytes:
        """Send a request and return the reply. Raises ProcessError; `grace` seconds after the timeout, the process is
        killed."""
        return await self._wait(*self.send(payload), timeout, grace)

    def send(self, payload: bytes) -> tuple[int, asyncio.Future[bytes]]:
        """Send a request. Returns its number and a future of the reply, which raises ProcessDiedError."""
        assert self._handle.stdin is not None
        number = self._count = self._count + 1
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._handle.stdin.write(b"%d\n" % number + payload)
        if self._reading.done():
            self._fail_replies("it had ended before the request")
        return number, reply

    async def _wait(self, number: int, reply: asyncio.Future[bytes], timeout: float, grace: float) -> bytes:
        try:
            await asyncio.wait((reply,), timeout=timeout)
            await asyncio.wait((reply,), timeout=grace)  # it may have arrived while the event loop was blocked
        finally:
            self._waiting.pop(number, None)
        if reply.done():
            return reply.result()
        await self.end_and_describe_exit()
        raise ProcessTimeoutError(f"the process gave no answer within {timeout:g} s")

    async def _read_replies(self) -> None:
        assert self._handle.stdout is not None
        try:
            while (line := await self._handle.stdout.readline()).endswith(b"\n"):
                number, _, text = line.partition(b" ")
                reply = self._waiting.pop(int(number), None)
                if reply is not None and not reply.done():
                    reply.set_result(text)
        finally:
            self._fail_replies(await self.end_and_describe_exit(EXIT_GRACE))

    def _fail_replies(self, exit_description: str) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(ProcessDiedError(f"the process died ({exit_description})"))
                reply.exception()  # marks it as retrieved, because nothing may wait for the reply
        self._waiting.clear()

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None if the process is running."""
        return self._handle.returncode

    @property
    def is_running(self) -> bool:
        return self._handle.returncode is None

    @property
    def has_closed_output(self) -> bool:
        """Whether every process that could reply has ended."""
        return self._reading.done()

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.is_running:
            for kill in (os.killpg, os.kill):  # a process that was just forked has no process group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self._handle.pid, signal.SIGKILL)

    async def end_and_describe_exit(self, grace_seconds: float = 0.0) -> str:
        """Wait up to `grace_seconds` for the process to exit, kill it if necessary, and describe how it ended."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._handle.wait(), grace_seconds)
        finally:
            self.kill()
        code = await self._handle.wait()
        return f"exit code {code}" if code >= 0 else format_signal(-code)

    async def finish(self, timeout: float) -> None:
        """Close the pipe of requests, which ends the process. After `timeout` seconds, the process is killed."""
        assert self._handle.stdin is not None
        self._handle.stdin.close()
        await self.end_and_describe_exit(timeout)
        await self.close()

    async def close(self, timeout: float = EXIT_GRACE) -> None:
        """Kill the process, and wait until no process is left that could reply, at most `timeout` seconds."""
        self.kill()
        await self._handle.wait()
        await asyncio.wait((self._reading,), timeout=timeout)
        self._reading.cancel()
        await asyncio.wait((self._reading,))
        if self._handle.stdin is not None:
            self._handle.stdin.close()


def format_signal(number: int) -> str:
    """Return the name of a signal. Most real-time signals have only a number.

    >>> format_signal(11), format_signal(40)
    ('SIGSEGV', 'signal 40')
    """
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def reserve_stdin_and_stdout() -> tuple[BufferedReader, BinaryIO]:
    """Return the pipes of requests and replies. Code that runs later gets an empty stdin, and its prints go to
    stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies
