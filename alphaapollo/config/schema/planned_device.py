"""`trainer.planned_device`: the GPU for which a dry run plans, and the sizes and speeds of GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from pydantic import AfterValidator

from alphaapollo.utils.disk import read_yaml


class Gpu(NamedTuple):
    """Size and speed of a GPU; gpus.yaml describes the fields."""

    part: str
    mib: int
    tflops: float
    bandwidth: float
    link: float


GPUS = msgspec.convert(read_yaml(Path(__file__).parents[1] / "gpus.yaml"), dict[str, Gpu])


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
    if device:
        get_planned_gpu_memory(device)
    return device


PlannedDevice = Annotated[str, AfterValidator(_check_device)]
