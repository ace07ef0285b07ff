"""Run a command that has a run folder: lock the folder, handle signals, return the exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from types import FrameType
from typing import Any

from alphaapollo.config.errors import report_error
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.failures import FAILURES
from alphaapollo.utils.folder_lock import FolderInUseError, lock_folder


def run_in_locked_folder(
    trainer: RunSettings,
    prepare: Callable[[], Any],
    run: Callable[[Any], None],
    interrupted_message: Callable[[], str],
) -> int:
    """Lock the run's folder, call `prepare`, and call `run` with the result. A dry run only prepares, without a lock.

    Returns the exit code: 0 done, 1 failed, 2 refused because `prepare` raised ValueError or another process uses the
    folder, 130 interrupted.
    """
    try:
        with nullcontext() if trainer.dry_run else lock_folder(trainer.folder):
            try:
                prepared = prepare()
            except ValueError as error:
                return report_error(error, 2)
            if trainer.dry_run:
                print("dry run: the configuration is valid, nothing was started.")
            else:
                run(prepared)
    except FolderInUseError as error:
        return report_error(error, 2)
    except KeyboardInterrupt:
        print(f"\n{interrupted_message()}", file=sys.stderr)
        return 130
    except FAILURES as error:
        return report_error(error, 1)
    return 0


def run_coroutine(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine like asyncio.run. After SIGINT, raise KeyboardInterrupt instead of WorkerLost, because the signal
    often ends the workers, too."""
    was_signalled = False

    async def await_coroutine_and_watch_sigint() -> None:
        handler = signal.getsignal(signal.SIGINT)  # asyncio's: it cancels this task

        def forward_signal(number: int, frame: FrameType | None) -> None:
            nonlocal was_signalled
            was_signalled = True
            assert callable(handler)
            handler(number, frame)

        signal.signal(signal.SIGINT, forward_signal)
        try:
            await coroutine
        finally:
            signal.signal(signal.SIGINT, handler)

    try:
        asyncio.run(await_coroutine_and_watch_sigint())
    except WorkerLost as death:
        if was_signalled:
            raise KeyboardInterrupt from death
        raise
