"""AdamW, its learning rate as a function of the step, and gradient clipping over slices; train_state.py takes the
step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from alphaapollo.config.schema import Optimizer
from alphaapollo.models.sharding import local_tensor, shard_group


def make_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """Decoupled weight decay (arXiv 1711.05101) of matrices only: not of norms and biases, which have one dimension."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def apply_settings(optimizer: torch.optim.Optimizer, config: Optimizer) -> None:
    """The configuration's settings, where a checkpoint has brought back those that it was written with."""
    for group in optimizer.param_groups:
        decays = group["params"][0].ndim >= 2
        group |= {"weight_decay": config.weight_decay if decays else 0.0, "betas": config.betas, "eps": config.eps}


def learning_rate(step: int, config: Optimizer, optimizer_steps: int) -> float:
    """Of optimizer step 0, 1, ..: linear warm-up that reaches lr at its last step, then constant, or a cosine towards
    min_lr_ratio * lr, which step `optimizer_steps` would have."""
    warmup = num_warmup_steps(config, optimizer_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.warmup_style == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, optimizer_steps - warmup))
    share = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


def num_warmup_steps(config: Optimizer, optimizer_steps: int) -> int:
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return round(config.lr_warmup_steps_ratio * optimizer_steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`; the norm before (a collective).

    The slices of one copy of the model make up every gradient, so their squares add up. Gradients that are not finite
    are left alone: the caller sees it by the norm.
    """
    slices = [p.grad for p in parameters if p.grad is not None]
    gradients = [local_tensor(one) for one in slices]
    total = torch.nn.utils.get_total_norm(gradients)
    square = total.to(torch.promote_types(total.dtype, torch.float32)).square()
    dist.all_reduce(square, group=shard_group(slices[0]))
    norm = math.sqrt(square.item())
    if max_norm < norm < math.inf:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
