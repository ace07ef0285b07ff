"""Optimizer steps from gradients, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from alphaapollo.plugins.verify.reference.samples import Config

Tensors = dict[str, Tensor]


def learning_rate(step: int, optim: Config, total: int) -> float:
    """Linear warm-up, then constant or cosine (arXiv 1608.03983, Eq. 5). step counts from 0."""
    ratio = optim.lr_warmup_steps_ratio
    warmup = round(ratio * total) if optim.lr_warmup_steps < 0 else optim.lr_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.warmup_style == "constant":
        return optim.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def clip(gradients: Tensors, max_norm: float) -> Tensors:
    """Scale the gradients so that their joint norm is at most max_norm (arXiv 1211.5063, Algorithm 1)."""
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    return {name: g * min(1.0, max_norm / norm) if norm else g for name, g in gradients.items()}


def adamw(w: Tensor, g: Tensor, state: Tensors, lr: float, optim: Config, decay: float) -> Tensor:
    """arXiv 1711.05101, Algorithm 2, with epsilon 1e-8. Changes the state."""
    one, two = optim.betas
    state["step"] = state.get("step", torch.zeros(())) + 1
    state["exp_avg"] = one * state.get("exp_avg", torch.zeros_like(w)) + (1 - one) * g
    state["exp_avg_sq"] = two * state.get("exp_avg_sq", torch.zeros_like(w)) + (1 - two) * g**2
    t = float(state["step"])
    m, v = state["exp_avg"] / (1 - one**t), state["exp_avg_sq"] / (1 - two**t)
    return w * (1 - lr * decay) - lr * m / (v.sqrt() + 1e-8)


def muon(w: Tensor, g: Tensor, state: Tensors, lr: float, decay: float) -> Tensor:
    """arXiv 2502.16982, Eq. 2 to 4, with Nesterov momentum 0.95 and five Newton-Schulz steps. Changes the state."""
    state["momentum_buffer"] = 0.95 * state.get("momentum_buffer", torch.zeros_like(w)) + 0.05 * g
    x = 0.05 * g + 0.95 * state["momentum_buffer"]
    x = (x.T if x.shape[0] > x.shape[1] else x) / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.T if w.shape[0] > w.shape[1] else x
    return w * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(w.shape)) * x


def find_decayed(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: all but norms and biases."""
    modules = ((path, m) for path, m in model.named_modules() if "norm" not in type(m).__name__.lower())
    own = ((f"{path}.{name}".lstrip("."), p) for path, m in modules for name, p in m.named_parameters(recurse=False))
    return {name for name, p in own if p.ndim >= 2 and "bias" not in name.rpartition(".")[2]}


def find_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon updates: the weights of linear layers and routers in the decoder's layers."""
    kinds = [
        (path, m)
        for path, m in model.named_modules()
        if isinstance(m, nn.Linear) or any(word in type(m).__name__.lower() for word in ("router", "gate"))
    ]
    own = ((f"{path}.{name}", p) for path, m in kinds for name, p in m.named_parameters(recurse=False))
    return {name for name, p in own if p.ndim == 2 and ".layers." in f".{name}"}


def conjugate_gradients(multiply: Callable[[Tensor], Tensor], b: Tensor, steps: int) -> Tensor:
    """Solve A x = b (Hestenes and Stiefel, 1952). [n] -> [n]."""
    x, residual, search = torch.zeros_like(b), b.clone(), b.clone()
    for _ in range(steps):
        if residual.norm() <= 1e-10 * b.norm():
            break
        product, square = multiply(search), residual @ residual
        size = square / (search @ product)
        x, residual = x + size * search, residual - size * product
        search = residual + (residual @ residual) / square * search
    return x


def trpo(start: Tensor, gradient: Tensor, evaluate: Callable[[Tensor], tuple[float, Tensor]], optim: Config) -> Tensor:
    """arXiv 1502.05477, appendix C: natural gradient step with KL(old||new) <= delta. [n] -> new weights [n].

    evaluate: weights [n] -> (loss, mean KL from the policy at `start`, with a graph to the weights).
    """

    def multiply(vector: Tensor) -> Tensor:
        """Multiply with the Fisher matrix, the Hessian of the KL, whose gradient is 0 at `start`."""
        distance = 1e-7 / float(vector.norm())
        weights = (start + distance * vector).requires_grad_(True)
        (gradient,) = torch.autograd.grad(evaluate(weights)[1], weights)
        return gradient / distance + optim.cg_damping * vector

    x = conjugate_gradients(multiply, gradient, optim.cg_steps)
    curvature, old = float(x @ multiply(x)), evaluate(start)[0]
    size = math.sqrt(2 * optim.delta / curvature) if curvature > 0 else 0.0
    for _ in range(10):
        loss, kl = evaluate(start - size * x)
        if loss < old and float(kl) <= optim.delta:
            return start - size * x
        size /= 2
    return start
