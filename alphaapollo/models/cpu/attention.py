"""Attention in the precision in which the device is fast: on a CPU bfloat16 goes through float32, for torch's backward
pass in bfloat16 takes up to three times as long there (torch 2.13), and its forward pass gains nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """Torch's, with its arguments; the output has the inputs' dtype."""
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        query, key, value = query.float(), key.float(), value.float()
    return F.scaled_dot_product_attention(query, key, value, **arguments).to(dtype)
