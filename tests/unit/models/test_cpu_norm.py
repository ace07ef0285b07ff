"""RMS norm for CPUs: equal to transformers', with as exact gradients, and only where the architecture has this norm."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from alphaapollo.models.cpu_norm import use_short_norms


def compute(norm: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    output = norm(x)
    return output.detach(), *torch.autograd.grad(output, (x, norm.weight), grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 50, 96), (1, 50, 3, 32), (1, 0, 96)])
def test_outputs_and_gradients_are_those_of_transformers(dtype: torch.dtype, shape: tuple[int, ...]):
    theirs = Qwen3RMSNorm(shape[-1], eps=1e-5)
    theirs.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    theirs = theirs.to(dtype)
    x, grad = (torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype).unbind()
    exact = compute(theirs.double(), x.double(), grad.double())
    theirs = theirs.to(dtype)
    expected = compute(theirs, x, grad)
    use_short_norms(theirs)
    actual = compute(theirs, x, grad)
    for ours, other, truth in zip(actual, expected, exact, strict=True):
        errors = [(one.double() - truth).norm() for one in (ours, other)]
        assert errors[0] <= 1.05 * errors[1] + 1e-6 * truth.norm()


def test_other_norms_are_unchanged():
    norm = GemmaRMSNorm(32)
    use_short_norms(nn.ModuleList([norm, nn.Linear(2, 2), nn.LayerNorm(4)]))
    assert "forward" not in vars(norm)
