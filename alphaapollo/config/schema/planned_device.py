"""`trainer.planned_device`: the GPU for which a dry run plans, and the sizes and speeds of GPUs."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator


class Gpu(NamedTuple):
    """Size and speed of a GPU."""

    part: str  # of the device name; the first match is used
    mib: int  # memory.total of nvidia-smi, which a run on the GPU also reads; 0: it is not planned for
    flops: float  # dense bfloat16 FLOP/s
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s from other GPUs of its node, in one direction: NVLink or PCIe


GPUS = {  # speeds from NVIDIA's data sheets and architecture white papers; gb200: a GPU of a superchip
    "gb200": Gpu("GB200", 0, 2.5e15, 8e12, 9e11),
    "b200": Gpu("B200", 183359, 2.25e15, 8e12, 9e11),
    "gh200": Gpu("GH200", 0, 9.89e14, 4.9e12, 4.5e11),
    "h200": Gpu("H200", 143771, 9.89e14, 4.8e12, 4.5e11),
    "h100_pcie": Gpu("H100 PCIe", 0, 7.56e14, 2e12, 6.4e10),
    "h100_nvl": Gpu("H100 NVL", 0, 8.35e14, 3.9e12, 6.4e10),
    "h100": Gpu("H100", 81559, 9.89e14, 3.35e12, 4.5e11),
    "h800": Gpu("H800", 81559, 9.89e14, 3.35e12, 2e11),
    "h20": Gpu("H20", 0, 1.48e14, 4e12, 4.5e11),
    "a100_40": Gpu("A100 SXM4 40GB", 40960, 3.12e14, 1.555e12, 3e11),
    "a100": Gpu("A100", 81920, 3.12e14, 2.039e12, 3e11),
    "a800": Gpu("A800", 0, 3.12e14, 2.039e12, 2e11),
    "l40s": Gpu("L40S", 46068, 3.62e14, 8.64e11, 3.2e10),
    "l40": Gpu("L40", 0, 1.81e14, 8.64e11, 3.2e10),
    "l4": Gpu("L4", 23034, 1.21e14, 3e11, 3.2e10),
    "a10g": Gpu("A10G", 0, 7.0e13, 6e11, 3.2e10),
    "a10": Gpu("A10", 0, 1.25e14, 6e11, 3.2e10),
    "rtx5090": Gpu("RTX 5090", 32607, 2.09e14, 1.792e12, 6.4e10),
    "rtx4090": Gpu("RTX 4090", 24564, 1.65e14, 1.008e12, 3.2e10),
    "rtx3090": Gpu("RTX 3090", 0, 7.1e13, 9.36e11, 3.2e10),
}


def get_planned_gpu_memory(device: str) -> int:
    """Return the bytes of a GPU: a name of GPUS, or a size such as 24GiB. Raises ValueError for other texts."""
    sizes = {name: gpu.mib for name, gpu in sorted(GPUS.items()) if gpu.mib}
    if mib := sizes.get(device.lower()):
        return mib * 2**20
    if size := re.fullmatch(r"([1-9]\d{0,3}(?:\.\d+)?) ?gib", device, re.IGNORECASE):
        return int(float(size[1]) * 2**30)
    raise ValueError(f"the GPU is unknown. Set one of {', '.join(sizes)}, or the memory of a GPU, e.g. 24GiB.")


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU with a name of GPUS, or with the name that its driver reports; None if it is not in the table."""
    words = f" {device_name.replace('-', ' ').replace('NVIDIA', '')} "
    return GPUS.get(device_name.lower()) or next((gpu for gpu in GPUS.values() if f" {gpu.part} " in words), None)


def _check_device(device: str) -> str:
    assert not device or get_planned_gpu_memory(device)
    return device


PlannedDevice = Annotated[str, AfterValidator(_check_device)]
