"""Checkpoints: the trainers copy what they hold while the loop waits, and write it while the next iteration goes on.

    save      wait for the one before; each trainer copies, a phase of its own (loop.py)
    behind    they write; when all have, the driver's own state follows, and the folder gets its name
    figures   what became of it, at the end of each iteration
    settled   at the end of a run, however it ends: wait for the one on its way
    guarded   with trainer.save_on_signal: a run that is told to end writes one first

The loop says when the trainers' state is between two whole iterations (`moves`), and when it is one (`stands`). Where
the copies do not fit (startup/memory.py) the trainers return from the save when they have written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from alphaapollo.checkpoint_folder import CheckpointFolder
from alphaapollo.controller.crew import Crew
from alphaapollo.observability.disk import writing
from alphaapollo.startup.failures import FAILURES
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.worth import far_better

PATIENCE = 30.0  # seconds that a run which has failed waits: its workers may hang


class Saving:
    """The checkpoint on its way: one at most.

    notice: tells people what became of one that nobody can wait for any more, and which one stays.
    """

    def __init__(self, checkpoints: CheckpointFolder, crew: Crew, notice: Callable[[str], None]):
        self.checkpoints, self.crew, self.notice = checkpoints, crew, notice
        self._behind: asyncio.Task[float] | None = None
        self._step = 0  # of that one
        self._seconds: float | None = None  # of one that became whole since `figures`
        self._moves, self._told = False, False
        self._stands: Progress | None = None  # since the start or the load
        self._spared: int | None = None  # the iteration whose checkpoint stays, as told

    async def save(self, progress: Progress) -> None:
        """Begin a checkpoint of everything that the whole iterations so far made. Raises what the one before met."""
        await self._settle()
        self.moves()
        self._step = progress.step
        progress.forget_rewards(self.checkpoints.steps())
        folder, now = self.checkpoints.begin(progress.step), deepcopy(progress)
        async with self.crew.engines.cache_released():
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

    def stands(self, progress: Progress) -> None:
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
        await self.crew.policy.save(str(folder / "policy"))
        await self.crew.policy.rest()
        if self.crew.critic:
            await self.crew.critic.save(str(folder / "critic"))
            await self.crew.critic.rest()

    async def _written(self) -> float:
        """Every trainer has written; the seconds of the slowest."""
        trainers = [role for role in (self.crew.policy, self.crew.critic) if role]
        return max(await asyncio.gather(*(role.written() for role in trainers)))

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

    async def _finish(self, folder: Path, progress: Progress) -> float:
        """All that follows the copies. Its own seconds"""
        seconds = await self._written()
        started = time.perf_counter()
        with writing("the checkpoint", folder):
            progress.write(folder)
            await asyncio.to_thread(self.checkpoints.finish, folder, self._spare(progress))
        return seconds + time.perf_counter() - started

    def _spare(self, progress: Progress) -> int | None:
        """The iteration whose checkpoint is not dropped, for the newest weights are far below it."""
        worth = progress.worth
        spared = far_better(worth, self.checkpoints.steps())
        if spared is not None and spared != self._spared and self.checkpoints.keep is not None:
            best, newest = worth[spared], worth[max(worth)]
            self.notice(
                f"the checkpoint of iteration {spared} stays beside the newest {self.checkpoints.keep}: its weights "
                f"had a mean reward of {best.mean:.3g} +- {best.error:.2g}, those of iteration {max(worth)} have "
                f"{newest.mean:.3g} +- {newest.error:.2g}. To go back to it: trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={self.checkpoints.path(spared)}"
            )
        self._spared = spared
        return spared
