"""A command's work in its run's folder, once everything is checked: the lock, signals, the exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from alphaapollo.config.errors import failed
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.failures import FAILURES
from alphaapollo.utils.folder_lock import FolderInUseError, lone_driver


def drive(folder: Path, work: Callable[[], None], interrupted: Callable[[], str]) -> int:
    """Work as the folder's only driver. Returns 0 done, 1 failed, 2 another one is at work there, 130 interrupted.

    interrupted: what to tell then, from what the folder holds by then.
    """
    try:
        with lone_driver(folder):
            work()
    except FolderInUseError as error:
        return failed(error, 2)
    except KeyboardInterrupt:
        print(f"\n{interrupted()}", file=sys.stderr)
        return 130
    except FAILURES as error:
        return failed(error, 1)
    return 0


def run_until_told(work: Coroutine[Any, Any, None]) -> None:
    """asyncio.run. Raises KeyboardInterrupt after a SIGINT or SIGTERM also where somebody's death got ahead of it: such
    signals often reach a whole group of processes."""
    told = False

    async def noticing() -> None:
        handler = signal.getsignal(signal.SIGINT)  # asyncio's: it cancels this task

        def notice(number: int, frame: FrameType | None) -> None:
            nonlocal told
            told = True
            assert callable(handler)
            handler(number, frame)

        signal.signal(signal.SIGINT, notice)
        try:
            await work
        finally:
            signal.signal(signal.SIGINT, handler)

    try:
        asyncio.run(noticing())
    except WorkerLost as death:
        if told:
            raise KeyboardInterrupt from death
        raise
