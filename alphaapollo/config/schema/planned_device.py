"""`trainer.planned_device`: the GPU for which a dry run plans."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

GPU_MIB = {
    "a100": 81920,
    "a100_40": 40960,
    "b200": 183359,
    "h100": 81559,
    "h200": 143771,
    "h800": 81559,
    "l4": 23034,
    "l40s": 46068,
    "rtx4090": 24564,
    "rtx5090": 32607,
}
"""memory.total of nvidia-smi in MiB, which a run on the GPU also reads."""


def get_planned_gpu_memory(device: str) -> int:
    """Return the bytes of a GPU: a name of GPU_MIB, or a size such as 24GiB. Raises ValueError for other texts."""
    if mib := GPU_MIB.get(device.lower()):
        return mib * 2**20
    if size := re.fullmatch(r"([1-9]\d{0,3}(?:\.\d+)?) ?gib", device, re.IGNORECASE):
        return int(float(size[1]) * 2**30)
    raise ValueError(f"the GPU is unknown. Set one of {', '.join(GPU_MIB)}, or the memory of a GPU, e.g. 24GiB.")


def _check_device(device: str) -> str:
    if device:
        get_planned_gpu_memory(device)
    return device


PlannedDevice = Annotated[str, AfterValidator(_check_device)]
