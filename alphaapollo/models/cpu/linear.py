"""float32 matrix products through oneDNN on CPUs where torch's own library is slow.

Torch computes float32 products with MKL, which does not use AVX-512 on processors that are not Intel's; oneDNN, which
torch also carries, does: 230 against 105 GFLOP/s a core on an AMD EPYC 9005. Same precision, IEEE float32.
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
def prefers_onednn() -> bool:
    """A rule, not a timing: two runs on one machine must compute the same bits."""
    info = Path("/proc/cpuinfo")
    vendor = info.read_text() if info.exists() else "GenuineIntel"
    return (
        "GenuineIntel" not in vendor
        and "avx512f" in vendor
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T without a gradient. [n, in], [out, in] -> [n, out]; any strides."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and prefers_onednn():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, the gradient of a weight. [n, out], [n, in] -> [out, in]. oneDNN copies a transposed first argument:
    let it be the smaller one."""
    if x.shape[1] < grad.shape[1]:
        return product(x.t(), grad.t()).t()
    return product(grad.t(), x.t())


def accelerate(model: nn.Module) -> None:
    """Send the model's linear layers through `product`, forward and backward; nothing where MKL is as good."""
    if not prefers_onednn():
        return
    _keep_few_kernels()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


@lru_cache
def _keep_few_kernels() -> None:
    """oneDNN keeps a kernel and a buffer of megabytes for each of the last 1024 shapes, and every micro-batch has a
    shape of its own. The limits are read at the first use, and are not for the processes that this one starts."""
    limits = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update(limits)
    product(torch.ones(2, 2), torch.ones(2, 2))
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@torch.compiler.disable
def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = _Linear.apply(flat, weight).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = product(grad, weight.t()) if needs_x else None
        grad_weight = outer(grad, x) if needs_weight else None
        return grad_x, grad_weight
