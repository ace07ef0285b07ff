"""float32 matrix products through oneDNN, for CPUs on which MKL is slow.

torch computes float32 products with MKL, which uses AVX-512 on Intel processors only. oneDNN, another part of torch,
uses AVX-512 on other CPUs: 230 instead of 105 GFLOP/s per core on an AMD EPYC 9005. Both compute in IEEE float32.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@lru_cache
def is_onednn_faster() -> bool:
    """Return whether oneDNN is faster than MKL, judged by the CPU model. Timing could differ between identical runs."""
    file = Path("/proc/cpuinfo")
    cpu_info = file.read_text() if file.exists() else "GenuineIntel"
    return (
        "GenuineIntel" not in cpu_info
        and "avx512f" in cpu_info
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _should_use_onednn(x: Tensor) -> bool:
    is_empty = x.numel() == 0  # on a rank without rows; oneDNN cannot compute an empty product
    return x.dtype == torch.float32 and x.device.type == "cpu" and is_onednn_faster() and not is_empty


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b with oneDNN if it is faster, without autograd. [n, in], [out, in] -> [n, out]; any strides."""
    if not _should_use_onednn(x):
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return y if bias is None else y + bias


def compute_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Compute grad^T x, the gradient of a weight. [n, out], [n, in] -> [out, in]"""
    if not _should_use_onednn(x):
        return grad.t() @ x
    if x.shape[1] < grad.shape[1]:  # oneDNN copies a transposed first argument, so it gets the smaller one first
        return linear(x.t(), grad.t()).t()
    return linear(grad.t(), x.t())


def use_onednn(model: nn.Module) -> None:
    """Compute the forward and backward passes of the model's linear layers with oneDNN if it is faster than MKL."""
    if not is_onednn_faster():
        return
    _limit_onednn_cache()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward_linear, module)  # type: ignore[method-assign]


@lru_cache
def _limit_onednn_cache() -> None:
    """Limit oneDNN's cache of kernels and buffers (megabytes each) to 64 input shapes instead of 1024, because most
    micro-batches have a new shape. oneDNN reads the limits once, from environment variables that are then removed."""
    limits = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
    added_variables = {name: value for name, value in limits.items() if name not in os.environ}
    os.environ.update(added_variables)
    linear(torch.ones(2, 2), torch.ones(2, 2))
    for name in added_variables:
        del os.environ[name]


@torch.compiler.disable
def _forward_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = _OneDnnProduct.apply(flat, weight).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


class _OneDnnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = linear(grad, weight.t()) if needs_x else None
        grad_weight = compute_weight_grad(grad, x) if needs_weight else None
        return grad_x, grad_weight
