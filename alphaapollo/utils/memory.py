"""Measure the memory that is left."""

from __future__ import annotations

from pathlib import Path

import psutil

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container, in bytes, or "max"


def measure_available_memory() -> int:
    """Return the bytes of memory that this machine has left, at most the memory limit of the container."""
    limit = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.exists() else ""
    available = psutil.virtual_memory().available
    return min(available, int(limit)) if limit.isdigit() else available
