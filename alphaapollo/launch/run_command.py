"""Execution of a command in its run's folder: folder lock, signals, exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from alphaapollo.config.errors import report_error
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.failures import FAILURES
from alphaapollo.utils.folder_lock import FolderInUseError, lock_folder


def run_in_folder(folder: Path, work: Callable[[], None], interrupted: Callable[[], str]) -> int:
    """Lock the folder and call `work`. Returns the exit code: 0 done, 1 failed, 2 folder in use, 130 interrupted.

    interrupted: returns the message after a signal.
    """
    try:
        with lock_folder(folder):
            work()
    except FolderInUseError as error:
        return report_error(error, 2)
    except KeyboardInterrupt:
        print(f"\n{interrupted()}", file=sys.stderr)
        return 130
    except FAILURES as error:
        return report_error(error, 1)
    return 0


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine like asyncio.run. After a signal raise KeyboardInterrupt, even if a worker has died of it first,
    because signals often reach all processes of a group."""
    was_signalled = False

    async def watch_signals() -> None:
        handler = signal.getsignal(signal.SIGINT)  # asyncio's: it cancels this task

        def receive(number: int, frame: FrameType | None) -> None:
            nonlocal was_signalled
            was_signalled = True
            assert callable(handler)
            handler(number, frame)

        signal.signal(signal.SIGINT, receive)
        try:
            await work
        finally:
            signal.signal(signal.SIGINT, handler)

    try:
        asyncio.run(watch_signals())
    except WorkerLost as death:
        if was_signalled:
            raise KeyboardInterrupt from death
        raise
