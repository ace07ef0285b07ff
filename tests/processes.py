"""Processes that tests start and stop."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait until a condition holds, for so many seconds at most. Returns whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
