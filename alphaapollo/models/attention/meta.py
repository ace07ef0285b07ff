"""Attention on the meta device: it keeps the tensors that a backend keeps, for models/activations.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from alphaapollo.config.resolve import Attention
from alphaapollo.models.attention.backends import NAME, AttentionCall, attention_interface, explicit_attention


def register_meta(kind: Attention) -> str:
    """Register the meta version of a backend with transformers. Returns the value for `attn_implementation`."""
    from transformers import AttentionInterface

    name = f"{NAME}meta_{kind}"
    AttentionInterface.register(name, attention_interface(partial(_attend_on_meta, kind)))
    return name


def _attend_on_meta(kind: Attention, call: AttentionCall) -> Tensor:
    call.check_supported(kind)
    if kind in ("padded", "sdpa") and (call.softcap is not None or call.sinks is not None):
        call = call.ungrouped()
        return explicit_attention(call, call.query, call.key, call.value, None).transpose(1, 2).contiguous()
    output: Tensor = _FusedKernel.apply(call.query, call.key, call.value)
    return output


class _FusedKernel(torch.autograd.Function):
    """Shapes of a fused kernel: forward keeps inputs, output and one number per row of scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, width, size = query.shape
        output = query.new_empty(batch, width, heads, size)
        ctx.save_for_backward(query, key, value, output, query.new_empty(batch, heads, width, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
