"""Graders in processes that can be killed, so that none can stall or crash a run.

    run(request) -> queue -> a small batch to a process -> its replies, one by one

A process works through its jobs in order and replies to each, so the first unanswered job is the one at work: when its
time is up, or the process dies, that job alone fails and the others are queued again. Behind a slow job nothing waits:
other jobs go to other processes, and more are started for them. What failed has no reward: client.py makes it a Score
that says so, and training leaves its trajectory out.
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

from alphaapollo.rewards.grader_processes.protocol import (
    HEADER,
    IMPORTING,
    READY,
    READY_FOR_TURNS,
    Grading,
    to_frame,
    worker_command,
    worker_environment,
)
from alphaapollo.tools.sandbox.result import signal_name

START_TIMEOUT = 120.0  # seconds to start a process, or to import a grader's libraries in it
RESTART_DELAY = 1.0  # seconds after a process that did not start
PATIENCE = 0.5  # seconds after which the job at work is slow
MAX_EXTRA = 8  # processes beyond num_workers, while some are slow
IDLE_SECONDS = 10.0  # after which an extra process leaves
BATCH_SECONDS = 0.02  # of expected work to send to a process at a time ...
MAX_BATCH = 64  # ... and jobs
GRACE = 1.0  # seconds between the end of a process's output and its own
TICK = 0.05  # seconds between looks at the clocks


class GraderError(Exception):
    """A job has no reply: its process was killed at the time limit, died, or did not start."""


@dataclass
class _Job:
    request: bytes
    reply: asyncio.Future[bytes]

    def fail(self, reason: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(GraderError(reason))


class _Killed(GraderError):
    """By a signal, in its start."""


@dataclass(eq=False)
class _Process:
    """One grader's process, and the jobs that were sent to it."""

    handle: asyncio.subprocess.Process
    jobs: deque[_Job] = field(default_factory=deque)  # unanswered; the first is at work
    since: float = 0.0  # when it began to be
    importing: bool = False
    slow: bool = False
    stale: bool = False  # jobs in its pipe are now another's: it ends after the one at work
    timed_out: bool = False

    def send(self, jobs: list[_Job]) -> None:
        assert self.handle.stdin is not None
        self.since = time.monotonic()
        self.jobs.extend(jobs)
        self.handle.stdin.write(b"".join(to_frame(job.request) for job in jobs))

    async def receive(self) -> bytes:
        """The next frame; IncompleteReadError when the process has ended."""
        assert self.handle.stdout is not None
        (length,) = HEADER.unpack(await self.handle.stdout.readexactly(HEADER.size))
        return await self.handle.stdout.readexactly(length)

    def kill(self) -> None:
        """It and whatever it started."""
        if self.handle.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.handle.pid, signal.SIGKILL)

    async def end(self, grace: float = 0.0) -> str:
        """Kill it, unless it ends within `grace` seconds by itself, and say how it ended."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.handle.wait(), grace)
        finally:
            self.kill()  # also where the wait is cancelled: the pool closes meanwhile
        code = await self.handle.wait()
        return signal_name(-code) if code < 0 else f"exit code {code}"


class GraderPool:
    """Sends requests to processes of alphaapollo.rewards.grader_processes.worker. Lives on one event loop.

    Args:
        grading: what each process computes.
        timeout: seconds one job may take.
        num_workers: processes that take jobs; slow ones do not count, up to MAX_EXTRA of them.
    """

    def __init__(self, grading: Grading, timeout: float, num_workers: int):
        self._grading = grading
        self._timeout = timeout
        self._num_workers = num_workers
        self.takes_turns = False  # whether a function takes a trajectory: known once it has started
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._processes: set[_Process] = set()
        self._num_starting = 0
        self._next_start = 0.0
        self._seconds_per_job = BATCH_SECONDS / 4  # running mean
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def longest(self) -> float:
        """Seconds within which one job or another ends."""
        return max(self._timeout, START_TIMEOUT)

    async def start(self) -> None:
        """Start the first process (GraderError: it does not start, with the reason); the others follow."""
        self._add_task(self._serve(await self._spawn()))
        self._add_task(self._keep_watch())

    async def run(self, request: bytes) -> bytes:
        """The reply to one request (GraderError: there is none, with the reason)."""
        if not self._tasks:
            raise GraderError("the graders are closed")
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(job)
        return await job.reply

    async def close(self) -> None:
        """Kill all processes; what is not answered yet fails."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_queued("the graders are closed")

    def _add_task(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self) -> _Process:
        """A process that is ready, the second if a signal has ended the first."""
        try:
            return await self._spawn_one()
        except _Killed:
            return await self._spawn_one()

    async def _spawn_one(self) -> _Process:
        try:
            handle = await asyncio.create_subprocess_exec(
                *worker_command(self._grading),
                env=worker_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the driver, which closes us; and killpg takes its children too
            )
        except OSError as error:
            raise GraderError(f"the grader's process cannot be started ({error})") from error
        process = _Process(handle)
        try:
            frame = await asyncio.wait_for(process.receive(), START_TIMEOUT)
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            ending, died = await process.end(GRACE), isinstance(error, asyncio.IncompleteReadError)
            kind = _Killed if died and (process.handle.returncode or 0) < 0 else GraderError
            raise kind(f"the grader's process does not start ({ending})") from error
        except asyncio.CancelledError:
            await process.end()
            raise
        if frame not in (READY, READY_FOR_TURNS):
            await process.end()
            raise GraderError(frame.decode())
        self.takes_turns = frame == READY_FOR_TURNS
        return process

    async def _serve(self, process: _Process) -> None:
        """Feed one process until it ends, or is not wanted any more."""
        self._processes.add(process)
        try:
            while not process.stale and (jobs := await self._take()):
                process.send(jobs)
                await self._collect(process)
        except asyncio.IncompleteReadError:
            job = process.jobs.popleft()  # never queued again: it would end the next process too
            reason = f"no answer within {self._timeout:g} s" if process.timed_out else "its process died"
            try:
                ending = await process.end(GRACE)
                reason += "" if process.timed_out else f" ({ending})"
            finally:
                job.fail(f"the reward function gave no reward: {reason}")
        finally:
            self._processes.discard(process)
            self._requeue(process.jobs)
            await process.end()

    async def _take(self) -> list[_Job]:
        """The next jobs for one process; none if it is an extra one and there is nothing to do."""
        try:
            async with asyncio.timeout(IDLE_SECONDS):  # unlike wait_for, it never loses what it got
                jobs = [await self._queue.get()]
        except TimeoutError:
            return [] if len(self._processes) > self._num_workers else [await self._queue.get()]
        share = self._queue.qsize() // self._num_workers
        limit = min(MAX_BATCH, share, int(BATCH_SECONDS / self._seconds_per_job))
        while len(jobs) < limit:
            jobs.append(self._queue.get_nowait())
        return jobs

    async def _collect(self, process: _Process) -> None:
        """Receive the replies to all jobs of a process."""
        while process.jobs:
            frame = await process.receive()
            now = time.monotonic()
            process.importing = frame == IMPORTING
            if frame not in (IMPORTING, READY):
                job = process.jobs.popleft()
                if not job.reply.done():
                    job.reply.set_result(frame)
                self._seconds_per_job += 0.1 * (now - process.since - self._seconds_per_job)
                process.slow = False
            process.since = now

    async def _keep_watch(self) -> None:
        """Look at the clocks, and keep enough processes running."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            late, last = now - last - TICK, now
            for process in self._processes:
                process.since = min(process.since + late, now)  # our loop was held up: replies may wait to be read
                self._look_at(process, now)
            self._start_missing(now)

    def _look_at(self, process: _Process, now: float) -> None:
        if not process.jobs:
            return
        seconds = now - process.since
        if seconds > (START_TIMEOUT if process.importing else self._timeout):
            process.timed_out = True
            process.kill()
        elif seconds > PATIENCE and not process.slow and not process.importing:
            process.slow = True
            behind = [process.jobs.pop() for _ in range(len(process.jobs) - 1)]
            process.stale = bool(behind)
            self._requeue(reversed(behind))

    def _start_missing(self, now: float) -> None:
        ready = sum(not process.slow for process in self._processes) + self._num_starting
        total = len(self._processes) + self._num_starting
        wanted = total < self._num_workers or (not self._queue.empty() and total < self._num_workers + MAX_EXTRA)
        if ready < self._num_workers and wanted and now >= self._next_start:
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
