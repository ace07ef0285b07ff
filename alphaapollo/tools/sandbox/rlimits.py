"""Resource limits: memory, CPU time, size of a file, open files, no core dumps."""

from __future__ import annotations

import resource
from pathlib import Path

MEBIBYTE = 1 << 20
FILE_BYTES = 32 * MEBIBYTE
OPEN_FILES = 128


def address_space() -> int:
    """Bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def apply(base_bytes: int, memory_mb: int, cpu_seconds: int) -> None:
    """`base_bytes`: what the interpreter has mapped already; `memory_mb` comes on top of it.

    The number of processes is not limited here (RLIMIT_NPROC does not hold for root, and counts all processes of a
    user): seccomp lets none be started, and the zygote counts threads.
    """
    for kind, value in {
        resource.RLIMIT_AS: base_bytes + memory_mb * MEBIBYTE,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One second between the signal that says so (SIGXCPU) and the one that ends it.
        resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU and hard != value else value))
