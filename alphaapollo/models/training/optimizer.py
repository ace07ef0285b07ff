"""Optimizers, their learning rate schedule, and gradient clipping over shards. train_state.py runs the steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alphaapollo.config.schema import Optimizer
from alphaapollo.models.sharding import local_tensor
from alphaapollo.models.training.muon import ShardedMuon


def make_optimizers(model: nn.Module, config: Optimizer) -> list[torch.optim.Optimizer]:
    """Create the optimizers of the trained parameters: AdamW (arXiv 1711.05101) and, with name=muon, Muon for the
    matrices of the decoder layers. Norms and biases have no weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_layers = {parameter for layer in getattr(model, "layers", ()) for parameter in layer.parameters()}
    chosen = find_matrices(model) & in_layers if config.name == "muon" else set[nn.Parameter]()
    matrices = [parameter for parameter in trained if parameter in chosen]
    others = [parameter for parameter in trained if parameter not in chosen]
    decayed = find_decayed(model)
    groups = [[p for p in others if p in decayed], [p for p in others if p not in decayed]]
    adam_groups: list[dict[str, object]] = [{"params": group} for group in groups if group]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(ShardedMuon(matrices, lr=config.lr))
    if adam_groups and config.name == "adamw_8bit":
        from alphaapollo.models.training.adamw_8bit import make_adamw_8bit  # torchao may not be installed

        optimizers.append(make_adamw_8bit(adam_groups, config.lr, trained[0].is_cuda))
    elif adam_groups:
        optimizers.append(torch.optim.AdamW(adam_groups, lr=config.lr, fused=True))
    set_hyperparams(model, optimizers, config)
    return optimizers


def find_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of linear layers and of routers, which are linear maps."""
    return {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Linear) or re.search("router|gate", type(module).__name__, re.IGNORECASE)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    }


def find_decayed(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters with weight decay: all but norms and biases, which may have several dimensions, e.g. one
    for the experts."""
    return {
        parameter
        for module in model.modules()
        if "norm" not in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim >= 2 and "bias" not in name
    }


def set_hyperparams(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], config: Optimizer) -> None:
    """Set weight decay and betas from `config`. Call it again after loading a checkpoint, which restores old values."""
    decayed = find_decayed(model)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["weight_decay"] = config.weight_decay if group["params"][0] in decayed else 0.0
        if "betas" in group:
            group["betas"] = config.betas


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of the next step. torchao's optimizers have a tensor for it."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def list_plain_tensors(state: Any) -> list[Tensor]:
    """Return the tensors with the data of an optimizer state on this rank: codes and scales if it is quantized."""
    shard: Any = local_tensor(state)
    return [shard.codes, shard.scale] if hasattr(shard, "codes") else [shard]


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
