"""Limit the time of code from files that others wrote: chat templates and regular expressions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeadlineError(ValueError):
    """Code that took longer than its limit."""


@contextmanager
def limit_seconds(seconds: float, message: str) -> Iterator[None]:
    """Context manager that raises DeadlineError(message) in its block after `seconds`. It ends loops, regular
    expressions and arithmetic with large numbers, but not every call of compiled code. Threads other than the main one
    have no limit: commands check their inputs in the main thread, before they start workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise DeadlineError(message)

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again each second, if the code swallows the error
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # even if the signal arrives at the end of the block
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
