"""glibc's memory allocator in processes that compute on a CPU."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h


def keep_freed_memory() -> None:
    """Keep freed memory in this process, for all threads. Does nothing without glibc.

    By default glibc returns the memory of large tensors to the kernel, and each page of the next tensor causes a page
    fault. In an update these took a fifth of the processor time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_ARENA_MAX, 1)  # other arenas have at most 64 MiB
