"""Save a run after SIGTERM or Ctrl-C, before it ends (trainer.save_on_signal)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from alphaapollo.controller.ranks import CANCELLED_BY_MONITOR
from alphaapollo.launch.background_checkpoint import BackgroundCheckpointWriter, P
from alphaapollo.launch.failures import FAILURES


async def run_and_save_on_signal(saving: BackgroundCheckpointWriter[P], loop: Coroutine[Any, Any, None]) -> None:
    """Run the loop and, after a signal, save the last complete iteration.

    A signal cancels the current iteration, unless its update has begun: then the iteration is finished first. If a
    monitor cancels the run (a dead or stalled worker), nothing is finished or saved.
    """
    task = asyncio.ensure_future(loop)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError as error:
        saving.is_stopping, is_lost = True, CANCELLED_BY_MONITOR in error.args
        if is_lost or not saving.in_update:
            task.cancel()
        else:
            saving.notice("received a signal; finishing the current iteration. A second signal ends the run at once.")
        await asyncio.wait([task])
        if not is_lost:
            await _save_last(saving, None if task.cancelled() else task.exception())
        raise


async def _save_last(saving: BackgroundCheckpointWriter[P], error: BaseException | None) -> None:
    """Save the last complete iteration after the loop has ended. Errors are printed as notices, because the run ends.

    error: error of the loop; None if it was cancelled.
    """
    try:
        if error:
            raise error
        if progress := saving.unsaved_progress:
            saving.notice(f"received a signal; writing the checkpoint of iteration {progress.step}")
            saving.is_stopping = False
            await saving.save(progress)
    except FAILURES as failure:
        saving.notice(f"no checkpoint was written: {failure}")
