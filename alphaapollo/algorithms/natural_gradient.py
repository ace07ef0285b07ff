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
        max_steps: products with A; fewer if the norm of the residual falls below `tolerance` times that of b, or if
            rounding makes a curvature p^T A p negative.
    """
    x = [torch.zeros_like(part) for part in target]
    residual, search = ([part.clone() for part in target] for _ in range(2))
    square = first_square = dot(target, target)
    for _ in range(max_steps):
        if square <= tolerance**2 * first_square:
            break
        product = multiply(search)
        if not (curvature := dot(search, product)) > 0:
            break
        torch._foreach_add_(x, search, alpha=square / curvature)
        torch._foreach_add_(residual, product, alpha=-square / curvature)
        previous, square = square, dot(residual, residual)
        torch._foreach_mul_(search, square / previous)
        torch._foreach_add_(search, residual)
    return x, dot(x, target) - dot(x, residual)
