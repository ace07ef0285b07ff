"""Memory of the device. On a CPU it is that of the process, so that checks run the same code there."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device in bytes."""

    on_gpu: bool

    def get_allocated(self) -> int:
        """Bytes of tensors (GPU), or resident bytes of the process (CPU)."""
        import torch

        return torch.cuda.memory_allocated() if self.on_gpu else self._get_resident()

    def get_peak(self) -> int:
        """Largest number of bytes since reset_peak."""
        import torch

        return torch.cuda.max_memory_allocated() if self.on_gpu else self._get_resident()

    def get_used(self) -> int:
        """Bytes in use by all processes and libraries."""
        import torch

        if not self.on_gpu:
            return self._get_resident()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def get_total(self) -> int:
        import torch

        if self.on_gpu:
            return torch.cuda.get_device_properties(0).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def reset_peak(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def free_unused(self) -> None:
        """Free tensors without references, and torch's cache."""
        import torch

        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()

    @staticmethod
    def _get_resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
