from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from alphaapollo.models.cpu.attention import scaled_dot_product_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bfloat16_goes_through_float32_forward_and_backward(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 8, generator=generator).to(dtype) for _ in range(3)]
    query, key, value = own = [x.clone().requires_grad_() for x in tensors]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = [x.to(wide).requires_grad_() for x in tensors]
    output = scaled_dot_product_attention(query, key, value, is_causal=True)
    reference = F.scaled_dot_product_attention(*expected, is_causal=True)
    assert output.dtype == dtype
    assert torch.equal(output, reference.to(dtype))
    output.sum().backward()
    reference.sum().backward()
    for one, other in zip(own, expected, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad.to(dtype))
