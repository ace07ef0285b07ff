from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from alphaapollo.models import cpu_linear


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")
@pytest.mark.parametrize("bias", [True, False])
def test_same_values_and_gradients_as_torch(monkeypatch: pytest.MonkeyPatch, bias: bool):
    monkeypatch.setattr(cpu_linear, "prefers_onednn", lambda: True)
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 16, bias=bias))
    plain = copy.deepcopy(ours)
    cpu_linear.accelerate(ours)
    x, y = torch.randn(2, 3, 7, 24)
    x.requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for own, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def test_other_dtypes_stay_with_torch():
    layer = nn.Linear(4, 2, dtype=torch.float64)
    cpu_linear.accelerate(layer)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
