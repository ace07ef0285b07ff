"""Attention over short rows on a CPU, as matrix products.

torch's fused kernel for CPUs (torch 2.13) saves memory, but multiplies small float32 blocks. For up to MAX_KEYS tokens,
complete products are up to four times as fast in bfloat16, and up to three times in float32. Scores are float32; the
other products, and the gradients of scores, have the dtype of their inputs and sum in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

MAX_KEYS = 256  # with more, the probabilities take more memory than the fused kernel saves time


def attend_with_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Compute masked attention. Consecutive query heads share a key and value head.

    Args:
        query: [b, heads, T, d]
        key: [b, kv heads, S, d]
        value: [b, kv heads, S, e]
        mask: bool, broadcast to [b, 1, T, S]; true where a token attends to a key. No row is all false.
        scale: factor of the scores; None: 1 / sqrt(d).

    Returns [b, heads, T, e].
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    bias = torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)
    output: Tensor = _AttentionProducts.apply(query, key, value, bias, scale)
    return output


class _AttentionProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
        (rows, heads, length, size), (kv_heads, num_keys) = query.shape, key.shape[1:3]
        groups = heads // kv_heads
        q = query.reshape(rows * kv_heads, groups * length, size)  # as if a key head's query heads were further tokens
        k, v = (x.reshape(rows * kv_heads, num_keys, -1) for x in (key, value))
        scores = torch.bmm(q.float() * scale, k.float().transpose(1, 2))
        scores.view(rows, heads, length, num_keys).add_(bias)
        probabilities = scores.softmax(dim=-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape, value.shape)
        return torch.bmm(probabilities, v).view(rows, heads, length, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        grad = grad.reshape(*q.shape[:2], -1)
        grad_v = torch.bmm(probabilities.transpose(1, 2), grad)
        grad_p = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_p, probabilities, -1, q.dtype).mul_(ctx.scale)
        grads = torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q), grad_v
        return *(part.view(shape) for part, shape in zip(grads, ctx.shapes, strict=True)), None, None
