"""Checkpoint on SIGTERM or Ctrl-C (trainer.save_on_signal). The last iteration is saved before the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from alphaapollo.controller.ranks import CANCELLED_BY_MONITOR
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint, P
from alphaapollo.launch.failures import FAILURES


async def run_and_save_on_signal(saving: BackgroundCheckpoint[P], loop: Coroutine[Any, Any, None]) -> None:
    """Run the loop and, after a signal, save the last complete iteration. The current iteration is finished first if it
    has changed the trainers, and cancelled otherwise. If a monitor cancels the run, nothing is finished or saved."""
    task = asyncio.ensure_future(loop)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError as error:
        saving.is_stopping, is_lost = True, CANCELLED_BY_MONITOR in error.args
        if is_lost or not saving.in_update:
            task.cancel()
        else:
            saving.notice("got a signal: finishing the current iteration first; a second signal ends the run at once")
        await asyncio.wait([task])
        if not is_lost:
            await _save_last(saving, None if task.cancelled() else task.exception())
        raise


async def _save_last(saving: BackgroundCheckpoint[P], error: BaseException | None) -> None:
    """Save the last complete iteration after the loop has ended. Print errors as notices, because the run ends."""
    try:
        if error:
            raise error
        if progress := saving.unsaved:
            saving.notice(f"got a signal: writing the checkpoint of iteration {progress.step} first")
            saving.is_stopping = False
            await saving.save(progress)
    except FAILURES as failure:
        saving.notice(f"no checkpoint was written: {failure}")
