"""Kernels without grouped heads, and bfloat16 on a CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from alphaapollo.models import attention as backends
from alphaapollo.models.micro_batch import Packing


def make_call(**changes: Any) -> backends.AttentionCall:
    """Rows of 5 and 3 tokens, 4 query heads, 2 key heads."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 8, 6), torch.randn(1, 2, 8, 6), torch.randn(1, 2, 8, 6)
    packing = Packing(torch.tensor([0, 5, 8], dtype=torch.int32), [5, 3])
    return backends.AttentionCall("Layer", query, key, value, **({"packing": packing} | changes))


@pytest.mark.parametrize("window", [None, 2])
def test_repeated_keys_and_values_compute_the_same(window: int | None):
    call = make_call(window=window)
    ungrouped = call.repeat_key_value_heads()
    assert ungrouped.key.shape == ungrouped.value.shape == (1, 4, 8, 6)
    assert not ungrouped.is_gqa and ungrouped.repeat_key_value_heads() is ungrouped
    torch.testing.assert_close(backends._attend_sdpa(ungrouped), backends._attend_sdpa(call))
    torch.testing.assert_close(backends._attend_padded(ungrouped), backends._attend_padded(call))


@pytest.mark.parametrize(
    ("device", "dtype", "has_mask", "is_supported"),
    [
        ("cpu", torch.float32, True, True),
        ("cuda", torch.bfloat16, False, True),
        ("cuda", torch.bfloat16, True, False),
        ("cuda", torch.float32, False, False),
    ],
)
def test_when_sdpa_supports_grouped_heads(device: str, dtype: torch.dtype, has_mask: bool, is_supported: bool):
    assert backends.sdpa_supports_grouped_heads(device, dtype, has_mask) is is_supported


def test_only_a_window_shorter_than_the_rows_needs_a_mask(monkeypatch: pytest.MonkeyPatch):
    masks: list[bool] = []

    def note(device: str, dtype: torch.dtype, has_mask: bool) -> bool:
        masks.append(has_mask)
        return True

    monkeypatch.setattr(backends, "sdpa_supports_grouped_heads", note)
    for changes in ({"window": None}, {"window": 5}, {"window": 4}, *({"window": n, "packing": None} for n in (5, 8))):
        backends._prepare_for_sdpa(make_call(**changes))
    assert masks == [False, False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bfloat16_goes_through_float32_forward_and_backward(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 8, generator=generator).to(dtype) for _ in range(3)]
    query, key, value = own = [x.clone().requires_grad_() for x in tensors]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = [x.to(wide).requires_grad_() for x in tensors]
    output = backends.scaled_dot_product_attention(query, key, value, is_causal=True)
    reference = F.scaled_dot_product_attention(*expected, is_causal=True)
    assert output.dtype == dtype
    assert torch.equal(output, reference.to(dtype))
    output.sum().backward()
    reference.sum().backward()
    for one, other in zip(own, expected, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad.to(dtype))


@pytest.mark.parametrize(("installed", "major", "used"), [(True, 9, True), (False, 9, False), (True, 10, False)])
def test_flash_attention_3_is_used_on_hopper_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool, major: int, used: bool
):
    activated: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    assert backends.activate_flash_attention_3.__wrapped__() is used and activated == ["FA3"] * used
