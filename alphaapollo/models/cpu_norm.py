"""RMS norm (arXiv 1910.07467) with few passes over memory, for CPUs.

transformers writes each operation of the norm and of its gradient to memory, so that forward and backward pass take
twice the processor time. Both versions compute in float32 and round at the same places.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def use_short_norms(model: nn.Module) -> None:
    """Replace the model's RMS norms whose code is that of Llama's norm, as in most architectures."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    code = LlamaRMSNorm.forward.__code__
    for module in model.modules():
        own_code = getattr(type(module).forward, "__code__", code)
        if (own_code.co_code, own_code.co_consts, own_code.co_names) == (code.co_code, code.co_consts, code.co_names):
            module.forward = MethodType(_forward_norm, module)


def _forward_norm(norm: Any, x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dtype != norm.weight.dtype or x.dtype == torch.float64:
        return type(norm).forward(norm, x)
    output: Tensor = _RmsNorm.apply(x, norm.weight, norm.variance_epsilon)
    return output


class _RmsNorm(torch.autograd.Function):
    """y = w u with u = x / rms(x): x [..., H], w [H] -> [..., H]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scaled = x.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
        factor = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        u = scaled.mul_(factor).to(x.dtype)
        ctx.save_for_backward(u, weight, factor)
        return weight * u

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        u, weight, factor = ctx.saved_tensors
        grad_u, float_u = (grad * weight).float(), u.to(torch.float32, copy=True)
        mean_product = torch.linalg.vecdot(grad_u, float_u).div_(u.shape[-1])[..., None]
        grad_x = grad_u.sub_(float_u.mul_(mean_product)).mul_(factor).to(u.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        products = (grad * u).reshape(-1, u.shape[-1])
        return grad_x, (products.new_ones(1, len(products)) @ products)[0], None
