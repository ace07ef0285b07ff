"""Checkpoints that are written in the background. The trainers copy their state while the loop waits, and write the
copy during the next iteration.

    save              wait for the previous checkpoint, then let each trainer copy its state
    (background)      the trainers write their copies, the driver writes its state, and the folder is renamed
    metrics           called at the end of each iteration: return the result of the last checkpoint
    finish_on_exit    called at the end of a run: wait for the checkpoint that is being written

The loop calls `begin_update` before it changes the trainers' state and `end_update` after the iteration. If the copies
do not fit into memory (launch/memory), the trainers write during `save`. save_on_signal.py saves the last iteration of
an interrupted run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from alphaapollo.launch.checkpoint_folder import CheckpointFolder, RunProgress
from alphaapollo.observability.disk import explain_write_errors

FAILED_RUN_SECONDS = 30.0  # maximum wait of a failed run for its checkpoint, because its workers may hang


class SavableGroup(Protocol):
    """Interface of a trained worker group (controller/handles.py)."""

    async def save(self, folder: str) -> None: ...

    async def offload(self) -> None: ...

    async def wait_for_save(self) -> float: ...


P = TypeVar("P", bound=RunProgress)


class BackgroundCheckpoint(Generic[P]):
    """Writer of checkpoints, one at a time.

    Args:
        trainers: folder name in a checkpoint -> worker group.
        notice: prints a line about a checkpoint that is still being written when the run ends.
        copy_phase: context manager in which the trainers may use the GPUs to copy their state.
    """

    def __init__(
        self,
        checkpoints: CheckpointFolder,
        trainers: Mapping[str, SavableGroup],
        notice: Callable[[str], None],
        copy_phase: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ):
        self.checkpoints, self.trainers, self.notice, self._copy_phase = checkpoints, trainers, notice, copy_phase
        self._writing: asyncio.Task[float] | None = None
        self._step = 0  # iteration of the last checkpoint
        self._seconds: float | None = None  # writing time of a checkpoint completed since the last `metrics` call
        self.in_update, self.is_stopping = False, False  # is_stopping: end the run after this iteration
        self._consistent: P | None = None  # progress at the last `end_update`

    async def save(self, progress: P) -> None:
        """Start a checkpoint after a complete iteration. Raises the error of the previous checkpoint if it failed."""
        await self._wait_for_previous()
        self.begin_update()
        self._step = progress.step
        folder, now = self.checkpoints.begin(progress.step), deepcopy(progress)
        async with self._copy_phase():
            await self._copy(folder)
        self._writing = asyncio.create_task(self._finish(folder, now))
        self.end_update(progress)

    async def save_and_wait(self, folder: Path) -> None:
        """Write the trainers' part of a checkpoint and wait until it is on disk. Raises the error of the previous
        checkpoint if it failed."""
        await self._wait_for_previous()
        await self._copy(folder)
        await self._wait_for_save()

    def begin_update(self) -> None:
        """Mark the trainers' state as inconsistent, because it is being changed or copied."""
        self.in_update = True

    def end_update(self, progress: P) -> None:
        """Mark the trainers' state as consistent after an iteration. Raises CancelledError if the run is stopping."""
        self.in_update, self._consistent = False, deepcopy(progress)
        if self.is_stopping:
            raise asyncio.CancelledError

    @property
    def unsaved(self) -> P | None:
        """Progress of the last complete iteration, or None if a checkpoint of that iteration exists."""
        return self._consistent if self._consistent and self._consistent.step != self._step else None

    async def metrics(self) -> dict[str, float]:
        """Return the metrics of a checkpoint completed since the last call. Raises its error if it failed."""
        if self._writing and self._writing.done():
            await self._wait_for_previous()
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"checkpoint/write_seconds": seconds}

    @asynccontextmanager
    async def finish_on_exit(self) -> AsyncIterator[None]:
        """Context manager that finishes the last checkpoint at the end of its block and raises its error. If the block
        failed or was interrupted, the checkpoint's error is only printed as a notice."""
        try:
            yield
        except BaseException as error:
            await self._finish_or_report(FAILED_RUN_SECONDS if isinstance(error, Exception) else None)
            raise
        await self._wait_for_previous()

    async def _copy(self, folder: Path) -> None:
        """Let every trainer copy its state and start writing."""
        for name, trainer in self.trainers.items():
            await trainer.save(str(folder / name))
            await trainer.offload()

    async def _wait_for_save(self) -> float:
        """Wait until every trainer has written its copy. Returns the seconds of the slowest trainer."""
        return max(await asyncio.gather(*(trainer.wait_for_save() for trainer in self.trainers.values())))

    async def _wait_for_previous(self) -> None:
        if self._writing:
            await asyncio.wait([self._writing])  # an interrupt does not cancel the write
            writing, self._writing = self._writing, None
            self._seconds = writing.result()

    async def _finish_or_report(self, timeout: float | None) -> None:
        if self._writing is None:
            return
        name = f"the checkpoint of iteration {self._step}"
        self.notice(f"{name} is being written")
        await asyncio.wait([self._writing], timeout=timeout)
        if not self._writing.done():
            self.notice(f"{name} was not complete after {timeout:.0f} s and is dropped")
        elif error := self._writing.exception():
            self.notice(f"{name} could not be written: {error}")

    async def _finish(self, folder: Path, progress: P) -> float:
        """Complete a checkpoint after the trainers have copied their state. Returns the seconds of writing."""
        seconds = await self._wait_for_save()
        started = time.perf_counter()
        with explain_write_errors("the checkpoint", folder):
            progress.write(folder)
            await asyncio.to_thread(self.checkpoints.finish, folder)
        return seconds + time.perf_counter() - started
