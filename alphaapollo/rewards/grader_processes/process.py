"""Child process that grades one completion at a time and can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.rewards.grader_processes.protocol import IMPORTING, LoadReport, make_subprocess_environ
from alphaapollo.tools.sandbox.types import format_signal

START_TIMEOUT = 120.0  # seconds to start a process, or to import a grader's libraries
EXIT_GRACE = 1.0  # seconds between the end of a process's output and its exit
READ_GRACE = 0.05  # seconds to read a reply that arrived while the event loop was blocked
MAX_REPLY = 1 << 30  # bytes of a reply


class GraderError(ValueError):
    """Error for a grader process that did not reply in time, died, or did not start."""


class GraderTimeoutError(GraderError):
    """Error for a grader process that did not reply in time. A second attempt would take as long."""


class ProcessDiedError(GraderError):
    """Error for a grader process that crashed or was killed from outside."""


class GraderProcess:
    """Handle of a grader process (`grader_processes.worker`). The process is dead once a method raises GraderError."""

    def __init__(self, handle: asyncio.subprocess.Process):
        self._handle = handle
        self.is_importing = False
        self._reader: asyncio.Task[None] | None = None  # of the replies to overlapping requests
        self._waiting: dict[int, asyncio.Future[bytes]] = {}  # by the number of the request
        self._count = 0

    @classmethod
    async def create(cls, reward: Reward, custom: CustomRewardFunction) -> GraderProcess:
        """Start a grader process that dies with the current process. Call `wait_until_ready` next."""
        settings = json.dumps([reward.model_dump(), custom.model_dump()])
        worker = [sys.executable, "-P", "-m", "alphaapollo.rewards.grader_processes.worker", str(os.getpid()), settings]
        handle = await asyncio.create_subprocess_exec(
            *worker,
            env=make_subprocess_environ(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_REPLY,
            start_new_session=True,  # Ctrl-C goes to the driver alone, and killpg reaches the children
        )
        return cls(handle)

    async def wait_until_ready(self) -> LoadReport:
        """Wait until the reward functions are loaded. Raises ValueError if one cannot be loaded, GraderError if the
        process dies or does not answer within START_TIMEOUT."""
        report = LoadReport(**json.loads(await self._read_line(START_TIMEOUT)))
        if report.error:
            raise ValueError(report.error)
        return report

    async def send_request(self, request: bytes, timeout: float) -> bytes:
        """Send a request and return the reply line. `timeout`: seconds, not counting the import of libraries."""
        assert self._handle.stdin is not None
        self._handle.stdin.write(request)
        reply = await self._read_line(timeout)
        if reply == IMPORTING:
            self.is_importing = True
            await self._read_line(START_TIMEOUT)
            self.is_importing = False
            reply = await self._read_line(timeout)
        return reply

    async def send_overlapping_request(self, request: bytes, timeout: float) -> bytes:
        """Send a request to an async function, and return its reply. Other requests may be in flight."""
        assert self._handle.stdin is not None
        self._reader = self._reader or asyncio.create_task(self._read_numbered_replies())
        number = self._count = self._count + 1
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._handle.stdin.write(pickle.dumps(number) + request)
        try:
            async with asyncio.timeout(timeout + EXIT_GRACE):  # the process itself stops the function after `timeout`
                line: bytes = await reply
        except TimeoutError:
            await self.end_and_describe_exit()
        else:
            if line.strip():
                return line
        finally:
            del self._waiting[number]
        raise GraderTimeoutError(f"the grader process gave no answer within {timeout:g} s")

    async def _read_numbered_replies(self) -> None:
        assert self._handle.stdout is not None
        while (line := await self._handle.stdout.readline()).endswith(b"\n"):
            number, _, reply = line.partition(b" ")
            if (waiting := self._waiting.get(int(number))) and not waiting.done():
                waiting.set_result(reply)
        error = ProcessDiedError(f"the grader process died ({await self.end_and_describe_exit(EXIT_GRACE)})")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _read_line(self, timeout: float) -> bytes:
        assert self._handle.stdout is not None
        for limit in (timeout, READ_GRACE):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    line = await self._handle.stdout.readline()
                break
        else:
            await self.end_and_describe_exit()
            raise GraderTimeoutError(f"the grader process gave no answer within {timeout:g} s")
        if not line.endswith(b"\n"):
            raise ProcessDiedError(f"the grader process died ({await self.end_and_describe_exit(EXIT_GRACE)})")
        return line

    @property
    def is_running(self) -> bool:
        return self._handle.returncode is None

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._handle.pid, signal.SIGKILL)

    async def end_and_describe_exit(self, grace_seconds: float = 0.0) -> str:
        """Wait up to `grace_seconds` for the process to exit, kill it if necessary, and describe how it ended."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._handle.wait(), grace_seconds)
        finally:
            self.kill()
        code = await self._handle.wait()
        return format_signal(-code) if code < 0 else f"exit code {code}"
