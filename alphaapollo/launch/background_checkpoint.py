"""Checkpoints: the trainers copy what they hold while the loop waits, and write it while the next iteration goes on.

    save      wait for the one before; each trainer copies
    behind    they write; when all have, the driver's own state follows, and the folder gets its name
    figures   what became of it, at the end of each iteration
    settled   at the end of a run, however it ends: wait for the one on its way
    guarded   with trainer.save_on_signal: a run that is told to end writes one first

The loop says when the trainers' state is between two whole iterations (`moves`), and when it is one (`stands`). Where
the copies do not fit (launch/memory_plan.py) the trainers return from the save when they have written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.launch.failures import FAILURES
from alphaapollo.observability.disk import writing

PATIENCE = 30.0  # seconds that a run which has failed waits: its workers may hang


class Progress(Protocol):
    """The driver's own state."""

    step: int  # whole iterations

    def write(self, folder: Path) -> None:
        """Into a checkpoint."""
        ...


class Saved(Protocol):
    """The workers of a role, as handles.py has them."""

    async def save(self, folder: str) -> None: ...

    async def rest(self) -> None: ...

    async def written(self) -> float: ...


P = TypeVar("P", bound=Progress)


class BackgroundSave(Generic[P]):
    """The checkpoint on its way: one at most.

    Args:
        trainers: by their folder's name in a checkpoint.
        notice: tells people what became of one that nobody can wait for any more, and which one stays.
    """

    def __init__(self, checkpoints: CheckpointFolder, trainers: Mapping[str, Saved], notice: Callable[[str], None]):
        self.checkpoints, self.trainers, self.notice = checkpoints, trainers, notice
        self._behind: asyncio.Task[float] | None = None
        self._step = 0  # of that one
        self._seconds: float | None = None  # of one that became whole since `figures`
        self._moves, self._told = False, False
        self._stands: P | None = None  # since the start or the load

    def phase(self) -> AbstractAsyncContextManager[None]:
        """In which the trainers have the GPUs and copy."""
        return nullcontext()

    def begins(self, progress: P) -> None:
        """A checkpoint of `progress` begins, and the one before is whole."""

    def spare(self, progress: P) -> int | None:
        """The iteration whose checkpoint is not dropped, where there is such a one."""
        return None

    async def save(self, progress: P) -> None:
        """Begin a checkpoint of everything that the whole iterations so far made. Raises what the one before met."""
        await self._settle()
        self.moves()
        self._step = progress.step
        self.begins(progress)
        folder, now = self.checkpoints.begin(progress.step), deepcopy(progress)
        async with self.phase():
            await self._copy(folder)
        self._behind = asyncio.create_task(self._finish(folder, now))
        self.stands(progress)

    async def save_now(self, folder: Path) -> None:
        """Write what a checkpoint holds of the trainers, in a phase of theirs; it is on disk at the end. Raises what
        the checkpoint before met."""
        await self._settle()
        await self._copy(folder)
        await self._written()

    def moves(self) -> None:
        """From here the trainers' state is no whole iteration's, or is just being copied."""
        self._moves = True

    def stands(self, progress: P) -> None:
        """The trainers hold what the whole iterations so far made. CancelledError: the run has been told to end."""
        self._moves, self._stands = False, deepcopy(progress)
        if self._told:
            raise asyncio.CancelledError

    async def guarded(self, loop: Coroutine[Any, Any, None], gave_up: Sequence[Callable[[], bool]]) -> None:
        """Run the loop to its end. Where the run is told to end (it is cancelled), the iteration at work is given up if
        it has not touched the trainers, and finished else; then what stands is saved, if no checkpoint has it.

        gave_up: it was no signal, but one of those who watch over the run: nothing is waited for.
        """
        task = asyncio.ensure_future(loop)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self._told, lost = True, any(one() for one in gave_up)
            if lost or not self._moves:
                task.cancel()
            else:
                self.notice("told to end: the iteration at work is finished first; a second signal ends at once")
            await asyncio.wait([task])
            if not lost:
                await self._save_last(None if task.cancelled() else task.exception())
            raise

    async def _save_last(self, error: BaseException | None) -> None:
        """Of a run that was told to end, and whose loop has ended, maybe by an error. Errors are notices: it ends."""
        try:
            if error:
                raise error
            if self._stands and self._stands.step != self._step:
                self.notice(f"told to end: the checkpoint of iteration {self._stands.step} is written first")
                self._told = False
                await self.save(self._stands)
        except FAILURES as failure:
            self.notice(f"no checkpoint is written: {failure}")

    async def figures(self) -> dict[str, float]:
        """Of a checkpoint that became whole since the last call. Raises what it met, e.g. a full disk."""
        if self._behind and self._behind.done():
            await self._settle()
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"checkpoint/write_seconds": seconds}

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """After the block no checkpoint is on its way. Raises what the last one met; where the block itself has failed
        or was interrupted, that is a notice."""
        try:
            yield
        except BaseException as error:
            await self._leave(PATIENCE if isinstance(error, Exception) else None)
            raise
        await self._settle()

    async def _copy(self, folder: Path) -> None:
        """Every trainer begins to write."""
        for name, trainer in self.trainers.items():
            await trainer.save(str(folder / name))
            await trainer.rest()

    async def _written(self) -> float:
        """Every trainer has written; the seconds of the slowest."""
        return max(await asyncio.gather(*(trainer.written() for trainer in self.trainers.values())))

    async def _settle(self) -> None:
        if self._behind:
            await asyncio.wait([self._behind])  # an interrupt ends the waiting alone
            behind, self._behind = self._behind, None
            self._seconds = behind.result()

    async def _leave(self, seconds: float | None) -> None:
        """Wait no longer than that."""
        if self._behind is None:
            return
        self.notice(f"the checkpoint of iteration {self._step} is on its way to the disk")
        await asyncio.wait([self._behind], timeout=seconds)
        if not self._behind.done():
            self.notice(f"the checkpoint of iteration {self._step} was not whole after {seconds:.0f} s: it is left out")
        elif error := self._behind.exception():
            self.notice(f"the checkpoint of iteration {self._step} is not whole: {error}")

    async def _finish(self, folder: Path, progress: P) -> float:
        """All that follows the copies. Its own seconds"""
        seconds = await self._written()
        started = time.perf_counter()
        with writing("the checkpoint", folder):
            progress.write(folder)
            await asyncio.to_thread(self.checkpoints.finish, folder, self.spare(progress))
        return seconds + time.perf_counter() - started
