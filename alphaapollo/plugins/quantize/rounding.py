"""Rounding of weights to 4 bits, symmetric, with one scale per group of consecutive inputs."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_CODE = 7  # -8 is unused, so that no weight is clipped


def round_to_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round each weight to the nearest multiple of its group's scale, of which the largest weight is seven. [out, in]
    -> codes int8 [out, in], scales bfloat16 [out, in / group], which bfloat16 and float32 models read without
    rounding"""
    groups = weight.float().unflatten(1, (-1, group_size))
    scales = (groups.abs().amax(2) / LARGEST_CODE).clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.flatten(1).to(torch.int8), scales
