"""Arrays to the device in one copy, which on a GPU nobody waits for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The same names, shapes and types as views of one tensor on `device`.

    From pinned memory to a GPU, in the order of its stream: torch keeps the memory until the copy is done.
    """
    starts, total = {}, 0
    for name, array in arrays.items():
        starts[name] = total
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    buffer = host.numpy()
    for name, array in arrays.items():
        end = starts[name] + array.nbytes
        buffer[starts[name] : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return {
        name: there[starts[name] : starts[name] + array.nbytes].view(_dtype(array)).view(array.shape)
        for name, array in arrays.items()
    }


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
