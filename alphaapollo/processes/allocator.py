"""glibc's memory allocator in processes that compute on a CPU, and in the driver of a training.

By default glibc returns the memory of large tensors to the kernel, and each page of the next tensor causes a page
fault. Page faults took a fifth of the time of an update. Only the main thread's arena can keep large tensors. A
thread gets its arena when it starts, so sharing the main thread's arena must be set up before: in this process by
`share_main_arena`, in another process by the environment variable of ONE_ARENA.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
NEVER = -1
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}


def keep_freed_memory() -> None:
    """Keep freed memory in this process. Does nothing without glibc."""
    _set_option(M_MMAP_MAX, 0)
    _set_option(M_TRIM_THRESHOLD, NEVER)
    share_main_arena()


def share_main_arena() -> None:
    """Let the threads that start from now on share the main thread's arena. Does nothing without glibc."""
    _set_option(M_ARENA_MAX, 1)


def _set_option(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
