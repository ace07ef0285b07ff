"""Pool of grader processes that can be killed, so that a reward function can neither stall nor crash a run.

    run(request) -> queue -> a small batch to a process -> one reply for each request

A process works through its jobs in order, so its first unanswered job is the active one. When that job exceeds the time
limit or the process dies, only this job fails; the others return to the queue. Jobs never wait behind a slow one: they
go to other processes, and the pool starts more for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.rewards.grader_processes.protocol import (
    HEADER,
    IMPORTING,
    READY,
    READY_FOR_TURNS,
    to_frame,
    worker_command,
    worker_environment,
)
from alphaapollo.tools.sandbox.types import signal_name

START_TIMEOUT = 120.0  # seconds to start a process, or to import a grader's libraries in it
RESTART_DELAY = 1.0  # seconds after a process that did not start
SLOW_SECONDS = 0.5  # after which the active job counts as slow
MAX_EXTRA = 8  # processes beyond reward.num_workers, while some are slow
IDLE_SECONDS = 10.0  # after which an extra process is stopped
BATCH_SECONDS = 0.02  # expected work in one batch ...
MAX_BATCH = 64  # ... and its number of jobs
EXIT_GRACE = 1.0  # seconds between the end of a process's output and its exit
POLL_SECONDS = 0.05  # between two checks of the time limits


class GraderError(ValueError):
    """A job has no reply because its process was killed, died, or did not start."""


@dataclass
class _Job:
    request: bytes
    reply: asyncio.Future[bytes]

    def fail(self, reason: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(GraderError(reason))


@dataclass(eq=False)
class _GraderProcess:
    """One child process, and the jobs that were sent to it."""

    handle: asyncio.subprocess.Process
    jobs: deque[_Job] = field(default_factory=deque)  # unanswered; the first is active
    since: float = 0.0  # when the active job began
    is_importing: bool = False
    is_slow: bool = False
    is_stale: bool = False  # jobs in its pipe were reassigned: it ends after the active one
    timed_out: bool = False

    def send(self, jobs: list[_Job]) -> None:
        assert self.handle.stdin is not None
        self.since = time.monotonic()
        self.jobs.extend(jobs)
        self.handle.stdin.write(b"".join(to_frame(job.request) for job in jobs))

    async def receive(self) -> bytes:
        """Read the next frame (IncompleteReadError: the process has ended)."""
        assert self.handle.stdout is not None
        (length,) = HEADER.unpack(await self.handle.stdout.readexactly(HEADER.size))
        return await self.handle.stdout.readexactly(length)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.handle.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.handle.pid, signal.SIGKILL)

    async def end(self, grace: float = 0.0) -> str:
        """Wait up to `grace` seconds for the process to exit, kill it if necessary, and describe how it ended."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.handle.wait(), grace)
        finally:
            self.kill()  # also if the wait is cancelled because the pool closes
        code = await self.handle.wait()
        return signal_name(-code) if code < 0 else f"exit code {code}"


class GraderPool:
    """Sends requests to processes of `grader_processes.worker`. Belongs to one event loop.

    Slow processes do not count towards reward.num_workers, up to MAX_EXTRA of them.
    """

    def __init__(self, reward: Reward, custom: CustomRewardFunction):
        self._reward, self._custom = reward, custom
        self.takes_turns = False  # whether a function takes a trajectory; known once a process has started
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._processes: set[_GraderProcess] = set()
        self._num_starting = 0
        self._next_start = 0.0
        self._seconds_per_job = BATCH_SECONDS / 4  # running mean
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def max_job_seconds(self) -> float:
        """Longest time in which no job may finish."""
        return max(self._reward.timeout, START_TIMEOUT)

    async def start(self) -> None:
        """Start the first process (GraderError: it does not start); the others follow in the background."""
        self._add_task(self._serve(await self._spawn()))
        self._add_task(self._monitor())

    async def run(self, request: bytes) -> bytes:
        """Return the reply to one request (GraderError: there is none)."""
        if not self._tasks:
            raise GraderError("the graders are closed")
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(job)
        return await job.reply

    async def close(self) -> None:
        """Kill all processes and fail the unanswered jobs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._processes))  # of tasks cancelled before they began
        self._processes.clear()
        self._fail_queued("the graders are closed")

    def _add_task(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, is_retry: bool = False) -> _GraderProcess:
        """Start a process and wait until it is ready. One that a signal kills meanwhile is replaced once."""
        try:
            handle = await asyncio.create_subprocess_exec(
                *worker_command(self._reward, self._custom),
                env=worker_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to the driver alone, and killpg reaches the children
            )
        except OSError as error:
            raise GraderError(f"the grader process cannot be started: {error}") from error
        process, frame, problem = _GraderProcess(handle), b"", ""
        try:
            frame = await asyncio.wait_for(process.receive(), START_TIMEOUT)
        except TimeoutError:
            problem = f"is not ready after {START_TIMEOUT:g} s"
        except asyncio.IncompleteReadError:
            problem = f"does not start ({await process.end(EXIT_GRACE)})"
            if (handle.returncode or 0) < 0 and not is_retry:
                return await self._spawn(is_retry=True)
        finally:
            if frame not in (READY, READY_FOR_TURNS):
                await process.end()
        if problem:
            path = self._custom.path or self._reward.custom_module
            raise GraderError(f"{path}: " * bool(path) + f"the grader process {problem}")
        if frame not in (READY, READY_FOR_TURNS):
            raise GraderError(frame.decode())
        self.takes_turns = frame == READY_FOR_TURNS
        self._processes.add(process)
        return process

    async def _serve(self, process: _GraderProcess) -> None:
        """Send jobs to one process until it ends or is no longer needed."""
        try:
            while not process.is_stale and (jobs := await self._take_jobs()):
                process.send(jobs)
                await self._receive_replies(process)
        except asyncio.IncompleteReadError:
            job = process.jobs.popleft()  # never queued again, because it would end the next process too
            reason = f"no answer within {self._reward.timeout:g} s" if process.timed_out else "its process died"
            try:
                ending = await process.end(EXIT_GRACE)
                reason += "" if process.timed_out else f" ({ending})"
            finally:
                job.fail(f"the reward function gave no reward: {reason}")
        finally:
            self._processes.discard(process)
            self._requeue(process.jobs)
            await process.end()

    async def _take_jobs(self) -> list[_Job]:
        """Return the next jobs for one process; none if it is an extra process without work."""
        try:
            async with asyncio.timeout(IDLE_SECONDS):  # unlike wait_for, it never loses a job
                jobs = [await self._queue.get()]
        except TimeoutError:
            return [] if len(self._processes) > self._reward.num_workers else [await self._queue.get()]
        share = self._queue.qsize() // self._reward.num_workers
        limit = min(MAX_BATCH, share, int(BATCH_SECONDS / self._seconds_per_job))
        while len(jobs) < limit:
            jobs.append(self._queue.get_nowait())
        return jobs

    async def _receive_replies(self, process: _GraderProcess) -> None:
        """Receive the replies to all jobs of a process."""
        while process.jobs:
            frame = await process.receive()
            now = time.monotonic()
            process.is_importing = frame == IMPORTING
            if frame not in (IMPORTING, READY):
                job = process.jobs.popleft()
                if not job.reply.done():
                    job.reply.set_result(frame)
                self._seconds_per_job += 0.1 * (now - process.since - self._seconds_per_job)
                process.is_slow = False
            process.since = now

    async def _monitor(self) -> None:
        """Enforce the time limits, and keep enough processes running."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            delay, last = now - last - POLL_SECONDS, now
            for process in self._processes:
                process.since = min(process.since + delay, now)  # the event loop was blocked: replies may be unread
                self._check_limits(process, now)
            self._start_missing(now)

    def _check_limits(self, process: _GraderProcess, now: float) -> None:
        if not process.jobs:
            return
        seconds = now - process.since
        if seconds > (START_TIMEOUT if process.is_importing else self._reward.timeout):
            process.timed_out = True
            process.kill()
        elif seconds > SLOW_SECONDS and not process.is_slow and not process.is_importing:
            process.is_slow = True
            waiting = [process.jobs.pop() for _ in range(len(process.jobs) - 1)]
            process.is_stale = bool(waiting)
            self._requeue(reversed(waiting))

    def _start_missing(self, now: float) -> None:
        limit = self._reward.num_workers
        ready = sum(not process.is_slow for process in self._processes) + self._num_starting
        total = len(self._processes) + self._num_starting
        is_needed = total < limit or (not self._queue.empty() and total < limit + MAX_EXTRA)
        if ready < limit and is_needed and now >= self._next_start:
            self._num_starting += 1
            self._add_task(self._start_one())

    async def _start_one(self) -> None:
        try:
            process = await self._spawn()
        except GraderError as error:
            self._next_start = time.monotonic() + RESTART_DELAY
            if not self._processes:
                self._fail_queued(str(error))
            return
        finally:
            self._num_starting -= 1
        await self._serve(process)

    def _requeue(self, jobs: Iterable[_Job]) -> None:
        for job in jobs:
            self._queue.put_nowait(job)

    def _fail_queued(self, reason: str) -> None:
        while not self._queue.empty():
            self._queue.get_nowait().fail(reason)
