"""Measure the memory of processes in GiB."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import torch


def measure_process_memory() -> dict[str, float]:
    """Return the memory metrics of this process: current and peak resident memory, and GPU memory reserved by torch."""
    metrics = {
        "rss_gib": measure_resident_gib(),
        "rss_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if torch.cuda.is_available():
        metrics["cuda_gib"] = torch.cuda.memory_reserved() / 2**30
        metrics["cuda_peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics


def measure_resident_gib() -> float:
    """Return the resident memory of this process in GiB."""
    return float(psutil.Process().memory_info().rss) / 2**30


def read_peak_memory_gib(pid: int) -> float:
    """Return the peak resident memory of a process in GiB; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), "0")
    return int(kib) / 2**20
