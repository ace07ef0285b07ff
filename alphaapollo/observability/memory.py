"""The memory of processes, in GiB."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def process_memory() -> dict[str, float]:
    """Of this process: resident now and at most; on a GPU also what torch holds there."""
    figures = {"rss_gib": resident_gib(), "rss_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        figures["cuda_gib"] = torch.cuda.memory_reserved() / 2**30
        figures["cuda_peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return figures


def resident_gib() -> float:
    """What this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def peak_memory_gib(pid: int) -> float:
    """Most that a process ever had in memory; 0 for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or after
        return 0.0
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), "0")
    return int(kib) / 2**20
