"""Attention as matrix products, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from alphaapollo.models.cpu_attention import attend_with_products

ROWS, HEADS, QUERIES, KEYS = 3, 6, 5, 9


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize(("kv_heads", "value_size", "scale"), [(6, 16, None), (2, 16, 0.3), (1, 8, None)])
def test_output_and_gradients_equal_those_of_torch(
    dtype: torch.dtype, tolerance: float, kv_heads: int, value_size: int, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key = draw(ROWS, QUERIES, HEADS, 16).transpose(1, 2), draw(ROWS, kv_heads, KEYS, 16)  # query: strided
    value, grad = draw(ROWS, kv_heads, KEYS, value_size), draw(ROWS, HEADS, QUERIES, value_size)
    mask = torch.rand(ROWS, 1, QUERIES, KEYS, generator=generator) < 0.6
    mask[..., 0] = True
    results = []
    for attends_with_products in (True, False):
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        if attends_with_products:
            output = attend_with_products(*inputs, mask, scale)
        else:
            exact = [tensor.double() for tensor in inputs]
            output = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=scale, enable_gqa=True).to(dtype)
        results.append((output, *torch.autograd.grad(output, inputs, grad)))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
