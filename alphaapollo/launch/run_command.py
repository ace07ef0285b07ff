"""Run a command that has a run folder: lock the folder, handle signals, return the exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from types import FrameType
from typing import TypeVar

from alphaapollo.config.errors import report_error
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.controller.ranks import WorkerLost
from alphaapollo.launch.failures import FAILURES
from alphaapollo.observability.console import Console
from alphaapollo.observability.spans import SPANS
from alphaapollo.utils.folder_lock import FolderInUseError, lock_folder

T = TypeVar("T")


def run_in_locked_folder(
    trainer: RunSettings,
    console: Console,
    prepare: Callable[[], T],
    run: Callable[[T], None],
    show_end: Callable[[], None],
    make_resume_hint: Callable[[], str],
) -> int:
    """Lock the run's folder, call `prepare`, and call `run` with the result. A dry run only prepares, without a lock.

    The console is closed before an error is printed. show_end: prints what a run has changed, however it ended.
    Returns the exit code: 0 done, 1 failed, 2 refused because `prepare` raised ValueError or another process uses the
    folder, 130 interrupted.
    """
    is_prepared = False
    try:
        with console, nullcontext() if trainer.dry_run else lock_folder(trainer.folder):
            with SPANS("prepare"):
                prepared = prepare()
            if trainer.dry_run:
                console.show_line("dry run: the configuration is valid, nothing was started.")
                return 0
            is_prepared = True
            try:
                run(prepared)
            finally:
                show_end()
    except FolderInUseError as error:
        return report_error(error, 2)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {make_resume_hint()}", file=sys.stderr)
        return 130
    except FAILURES as error:
        if is_prepared and (hint := make_resume_hint()) not in str(error):
            print(hint)
        return report_error(error, 1 if is_prepared or not isinstance(error, ValueError) else 2)
    return 0


def run_coroutine(coroutine: Coroutine[object, object, None]) -> None:
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
