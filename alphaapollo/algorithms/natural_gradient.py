"""Conjugate gradients on vectors that are lists of tensors, for the natural gradient of TRPO (arXiv 1502.05477)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Vector = list[Tensor]


def conjugate_gradient(
    multiply: Callable[[Vector], Vector],
    target: Vector,
    dot: Callable[[Vector, Vector], float],
    max_steps: int,
    tolerance: float = 1e-10,
) -> tuple[Vector, float]:
    """Solve A x = b for a positive definite matrix A. Returns x and x^T A x.

    Args:
        multiply: v -> A v.
        target: b.
        dot: inner product of two vectors.
        max_steps: maximum number of products with A. The iteration ends early if the residual's norm falls below
            `tolerance` times the norm of b, or if rounding makes a curvature negative.
    """
    x = [torch.zeros_like(part) for part in target]
    residual, search = ([part.clone() for part in target] for _ in range(2))
    residual_square = target_square = dot(target, target)
    for _ in range(max_steps):
        if residual_square <= tolerance**2 * target_square:
            break
        product = multiply(search)
        if not (curvature := dot(search, product)) > 0:
            break
        torch._foreach_add_(x, search, alpha=residual_square / curvature)
        torch._foreach_add_(residual, product, alpha=-residual_square / curvature)
        previous_square, residual_square = residual_square, dot(residual, residual)
        torch._foreach_mul_(search, residual_square / previous_square)
        torch._foreach_add_(search, residual)
    return x, dot(x, target) - dot(x, residual)
