"""AdamW, its learning rate schedule, and gradient clipping over shards. train_state.py runs the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from alphaapollo.config.schema import Optimizer
from alphaapollo.models.sharding import local_tensor


def make_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """Create AdamW (arXiv 1711.05101) for the trained parameters. Norms and biases (one dimension) have no decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=config.lr, fused=True)
    set_hyperparams(optimizer, config)
    return optimizer


def set_hyperparams(optimizer: torch.optim.Optimizer, config: Optimizer) -> None:
    """Set weight decay and betas from `config`. Call it again after loading a checkpoint, which restores old values."""
    for group in optimizer.param_groups:
        decays = group["params"][0].ndim >= 2
        group |= {"weight_decay": config.weight_decay if decays else 0.0, "betas": config.betas}


def compute_learning_rate(step: int, config: Optimizer, total_steps: int) -> float:
    """Compute the learning rate of optimizer step `step`, counted from 0.

    The rate rises linearly to `config.lr` in the warm-up. After that it is constant, or falls along a cosine to
    min_lr_ratio * lr at step `total_steps`.
    """
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = round(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.warmup_style == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the gradient norm over all ranks to `max_norm` (a collective). Returns the norm before clipping.

    Non-finite gradients are not changed; then the returned norm is not finite either.
    """
    slices = [p.grad for p in parameters if p.grad is not None]
    gradients = [local_tensor(gradient) for gradient in slices]
    total = torch.nn.utils.get_total_norm(gradients)
    square = total.to(torch.promote_types(total.dtype, torch.float32)).square()
    # With HSDP, only the ranks that share one copy of the model add up their slices.
    mesh = slices[0].device_mesh if isinstance(slices[0], DTensor) else None
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names or () if name != "replicate"] if mesh else [None]
    for group in groups:
        dist.all_reduce(square, group=group)
    norm = math.sqrt(square.item())
    if max_norm < norm < math.inf:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
