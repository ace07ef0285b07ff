"""The reference's optimizers and schedules, and those of torch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from alphaapollo.config.schema import Optimizer
from alphaapollo.models.learning_rate import compute_learning_rate
from alphaapollo.plugins.verify.reference import optimizers


def random_matrices(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def test_adamw_equals_that_of_torch() -> None:
    optim, state = SimpleNamespace(betas=(0.9, 0.95)), {}
    (weight,) = random_matrices(0, (4, 3))
    parameter = torch.nn.Parameter(weight.clone())
    torchs = AdamW([parameter], lr=0.1, betas=optim.betas, eps=1e-8, weight_decay=0.2)
    for step in range(5):
        (parameter.grad,) = random_matrices(step + 1, (4, 3))
        torchs.step()
        weight = optimizers.adamw(weight, parameter.grad, state, 0.1, optim, 0.2)
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_equals_that_of_torch_up_to_bfloat16(shape: tuple[int, int]) -> None:
    """torch orthogonalizes in bfloat16, so a step differs by about 1 %."""
    state: dict[str, Tensor] = {}
    (weight,) = random_matrices(0, shape)
    parameter = torch.nn.Parameter(weight.clone())
    torchs = Muon([parameter], lr=0.1, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        before = weight
        (parameter.grad,) = random_matrices(step + 1, shape)
        parameter.data.copy_(weight)
        torchs.step()
        weight = optimizers.muon(weight, parameter.grad, state, 0.1, 0.2)
        assert (weight - parameter.detach()).norm() < 0.02 * (weight - before).norm()


@pytest.mark.parametrize("settings", [{"lr_warmup_steps": 4}, {"lr_warmup_steps_ratio": 0.1}])
@pytest.mark.parametrize("style", ["constant", "cosine"])
def test_learning_rate_of_a_run_equals_the_reference(settings: dict[str, float], style: str) -> None:
    config = Optimizer(lr=0.3, warmup_style=style, min_lr_ratio=0.2, **settings)
    for step in (0, 1, 3, 4, 9, 10, 11, 55, 99, 100, 1000):
        assert compute_learning_rate(step, config, 100) == pytest.approx(optimizers.learning_rate(step, config, 100))


@pytest.mark.parametrize("style", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [1, 4])
def test_learning_rate_equals_that_of_torch(style: str, warmup: int) -> None:
    settings = {"lr": 0.3, "lr_warmup_steps": warmup, "lr_warmup_steps_ratio": 0.0, "min_lr_ratio": 0.1}
    torchs = SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.3)
    after = CosineAnnealingLR(torchs, 16, eta_min=0.3 * 0.1) if style == "cosine" else LinearLR(torchs, 1.0)
    schedule = SequentialLR(torchs, [LinearLR(torchs, 1 / warmup, total_iters=warmup - 1), after], [warmup])
    for step in range(warmup + 16):
        rate = optimizers.learning_rate(step, SimpleNamespace(warmup_style=style, **settings), warmup + 16)
        assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-12), step
        torchs.step()
        schedule.step()


def test_gradients_are_clipped_as_by_torch() -> None:
    """torch adds 1e-6 to the norm."""
    gradients = dict(zip("ab", random_matrices(0, (3, 2), (5,)), strict=True))
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients.values()]
    for max_norm in (0.5, 1e9):
        for parameter, gradient in zip(parameters, gradients.values(), strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        found = optimizers.clip(gradients, max_norm).values()
        torch.testing.assert_close([*found], [p.grad for p in parameters], rtol=1e-6, atol=0)


def test_trpo_of_a_quadratic_model_is_the_natural_gradient() -> None:
    """With a KL of w^T F w / 2 and a linear loss, the first trial has KL = delta."""
    (root, gradient, start) = random_matrices(0, (6, 6), (6,), (6,))
    fisher = root @ root.T + torch.eye(6)
    optim = SimpleNamespace(delta=0.01, cg_damping=0.0, cg_steps=30)

    def evaluate(weights: Tensor) -> tuple[float, Tensor]:
        moved = weights - start
        return float(gradient @ moved.detach()), moved @ fisher @ moved / 2 - 1e-7  # below delta

    direction = torch.linalg.solve(fisher, gradient)
    expected = start - math.sqrt(2 * optim.delta / float(direction @ gradient)) * direction
    torch.testing.assert_close(optimizers.trpo(start, gradient, evaluate, optim), expected, rtol=1e-5, atol=1e-6)
