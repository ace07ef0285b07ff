from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from alphaapollo.models import cpu_linear as linear
from alphaapollo.models.cpu_linear import compute_weight_grad, is_onednn_faster


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")
@pytest.mark.parametrize(("bias", "length"), [(True, 7), (False, 7), (False, 0)])
def test_same_values_and_gradients_as_torch(monkeypatch: pytest.MonkeyPatch, bias: bool, length: int):
    monkeypatch.setattr(linear, "is_onednn_faster", lambda: True)
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 16, bias=bias))
    plain = copy.deepcopy(ours)
    linear.use_onednn(ours)
    x, y = torch.randn(2, 3, length, 24)
    x.requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for own, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def test_other_dtypes_stay_with_torch():
    layer = nn.Linear(4, 2, dtype=torch.float64)
    linear.use_onednn(layer)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.skipif(not is_onednn_faster(), reason="MKL's products of few rows depend on the number of threads")
def test_up_to_four_threads_compute_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    found: set[bytes] = set()
    before = torch.get_num_threads()
    x, grad = torch.randn(3000, 256, generator=generator), torch.randn(3000, 768, generator=generator)
    weight = torch.randn(768, 256, generator=generator)
    heads = torch.randn(4, 8, 150, 32, generator=generator)
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            states = heads.clone().requires_grad_()
            attended = F.scaled_dot_product_attention(states, states, states, is_causal=True)
            attended.backward(heads)
            assert states.grad is not None
            product = linear.linear
            results = [
                product(x, weight),
                product(x[:7], weight),
                product(grad, weight.t()),
                compute_weight_grad(grad, x),
            ]
            results += [attended.detach(), states.grad, torch.linalg.vector_norm(x)]
            found.add(b"".join(result.contiguous().numpy().tobytes() for result in results))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
