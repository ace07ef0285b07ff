"""Learning rate of each optimizer step: warm-up, then constant or cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from alphaapollo.config.schema import Optimizer


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of the next step. torchao's optimizers store it as a tensor."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def compute_learning_rate(step: int, config: Optimizer, total_steps: int) -> float:
    """Compute the learning rate of optimizer step `step`, counted from 0: a linear warm-up to `config.lr`, then
    constant, or a cosine to min_lr_ratio * lr at step `total_steps`."""
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
