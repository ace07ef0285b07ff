"""Write checkpoints while the next iteration runs.

The worker groups (policy, critic) copy their state while the loop waits, and write the copy during the next iteration:

    save              wait for the previous checkpoint, then let each worker group copy its state
    (background)      the worker groups write their copies, the driver writes its state, and the folder is renamed
    pop_metrics       called at the end of each iteration: return the writing time, or raise the error of the write
    finish_on_exit    called at the end of a run: wait for the checkpoint that is being written

The loop calls `mark_models_inconsistent` before it changes the models and `mark_models_consistent` after the
iteration. If the copies do not fit into memory (planning/memory_plan.py), the worker groups write during `save`.
run_and_save_on_signal saves the last iteration of an interrupted run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Generic, TypeVar

from alphaapollo.controller.errors import CANCELLED_BY_MONITOR, REPORTED_ERRORS
from alphaapollo.controller.handles import TrainingWorkerGroup
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, RunProgress
from alphaapollo.utils.disk import explain_write_errors

FAILED_RUN_SECONDS = 30.0  # maximum wait of a failed run for its checkpoint, because its workers may hang
P = TypeVar("P", bound=RunProgress)


class BackgroundCheckpointWriter(Generic[P]):
    """Writer of a run's checkpoints, one at a time.

    Args:
        groups: folder name in a checkpoint -> worker group.
        notice: prints a line about a checkpoint that is still being written when the run ends.
        open_copy_phase: returns a context manager in which the worker groups may use the GPUs to copy their state.
    """

    def __init__(
        self,
        checkpoints: CheckpointFolder,
        groups: Mapping[str, TrainingWorkerGroup[Any]],
        notice: Callable[[str], None],
        open_copy_phase: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ):
        self.checkpoints, self.groups, self.notice, self._open_copy_phase = checkpoints, groups, notice, open_copy_phase
        self._writing: asyncio.Task[float] | None = None
        self._step = 0  # iteration of the last checkpoint
        self._seconds: float | None = None  # writing time of a checkpoint completed since the last `pop_metrics` call
        self.in_update, self.is_stopping = False, False  # is_stopping: the run ends at `mark_models_consistent`
        self._consistent: P | None = None  # progress at the last `mark_models_consistent`

    async def save(self, progress: P) -> None:
        """Copy the state after an iteration, and start to write it. Raises the error of the previous checkpoint."""
        await self._wait_for_previous_checkpoint()
        self.mark_models_inconsistent()  # a signal must not interrupt the copies
        self._step = progress.step
        folder, saved_progress = self.checkpoints.begin_checkpoint(progress.step), deepcopy(progress)
        async with self._open_copy_phase():
            await self._copy_worker_groups(folder)
        self._writing = asyncio.create_task(self._complete_checkpoint(folder, saved_progress))
        self.mark_models_consistent(progress)

    async def save_and_wait(self, folder: Path) -> None:
        """Write the state of all worker groups to the folder, and wait until it is on disk."""
        await self._wait_for_previous_checkpoint()
        await self._copy_worker_groups(folder)
        await self._write_worker_groups()

    def mark_models_inconsistent(self) -> None:
        """Mark that an update has begun. If a signal arrives, the run ends only at `mark_models_consistent`."""
        self.in_update = True

    def mark_models_consistent(self, progress: P) -> None:
        """Mark the models as consistent after an iteration. Raises CancelledError if the run is stopping."""
        self.in_update, self._consistent = False, deepcopy(progress)
        if self.is_stopping:
            raise asyncio.CancelledError

    async def save_unsaved_iteration(self) -> None:
        """Save the last complete iteration of a run that ends, unless it has a checkpoint."""
        if (progress := self._consistent) and progress.step != self._step:
            self.notice(f"received a signal; writing the checkpoint of iteration {progress.step}")
            self.is_stopping = False  # otherwise `save` raises CancelledError
            await self.save(progress)

    def pop_metrics(self) -> dict[str, float]:
        """Return `checkpoint/write_seconds` of a newly completed checkpoint. Raises the error of a failed one."""
        if self._writing and self._writing.done():
            self._take_result(self._writing)
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"checkpoint/write_seconds": seconds}

    @asynccontextmanager
    async def finish_on_exit(self) -> AsyncIterator[None]:
        """Context manager that waits at its end for the checkpoint that is being written, and raises the error of a
        failed write. If the block itself failed or was interrupted, the write's error is only printed as a notice."""
        try:
            yield
        except BaseException as error:
            if self._writing:
                name = f"the checkpoint of iteration {self._step}"
                self.notice(f"waiting until {name} is written")
                timeout = FAILED_RUN_SECONDS if isinstance(error, Exception) else None
                await asyncio.wait([self._writing], timeout=timeout)
                if not self._writing.done():
                    self.notice(f"{name} was not complete after {timeout:.0f} s and is discarded")
                elif failure := self._writing.exception():
                    self.notice(f"{name} could not be written: {failure}")
            raise
        await self._wait_for_previous_checkpoint()

    async def _copy_worker_groups(self, folder: Path) -> None:
        """Let every worker group copy its state and start to write the copy."""
        for name, group in self.groups.items():
            await group.save(str(folder / name))
            await group.offload()

    async def _write_worker_groups(self) -> float:
        """Wait until every worker group has written its copy. Returns the seconds of the slowest one."""
        return max(await asyncio.gather(*(group.wait_for_save() for group in self.groups.values())))

    async def _wait_for_previous_checkpoint(self) -> None:
        if self._writing:
            await asyncio.wait([self._writing])  # an interrupt does not cancel the write
            self._take_result(self._writing)

    def _take_result(self, writing: asyncio.Task[float]) -> None:
        self._writing = None
        self._seconds = writing.result()

    async def _complete_checkpoint(self, folder: Path, progress: P) -> float:
        """Complete a checkpoint after all worker groups have copied their state. Returns the seconds of writing."""
        seconds = await self._write_worker_groups()
        started = time.perf_counter()
        with explain_write_errors("the checkpoint", folder):
            progress.write(folder)
            await asyncio.to_thread(self.checkpoints.complete_checkpoint, folder)
        return seconds + time.perf_counter() - started


async def run_and_save_on_signal(writer: BackgroundCheckpointWriter[P], training: Coroutine[Any, Any, None]) -> None:
    """Run the training loop and, after SIGTERM or Ctrl-C, save the last complete iteration (trainer.save_on_signal).

    A signal cancels the current iteration, unless its update has begun: then the iteration is finished first. If a
    monitor cancels the run (a dead or stalled worker), nothing is finished or saved.
    """
    task = asyncio.ensure_future(training)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError as signal:
        writer.is_stopping, is_worker_lost = True, CANCELLED_BY_MONITOR in signal.args
        if is_worker_lost or not writer.in_update:
            task.cancel()
        else:
            writer.notice("received a signal; finishing the current iteration. A second signal ends the run at once.")
        await asyncio.wait([task])
        if is_worker_lost:
            raise
        try:
            if not task.cancelled():
                task.result()
            await writer.save_unsaved_iteration()
        except REPORTED_ERRORS as failure:
            writer.notice(f"no checkpoint was written: {failure}")
        raise
