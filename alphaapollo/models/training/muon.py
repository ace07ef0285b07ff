"""Muon for matrices that FSDP2 has sharded over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from alphaapollo.models.sharding import full_tensor, local_tensor


class ShardedMuon(torch.optim.Muon):
    """torch's Muon (arXiv 2502.16982, Eq. 2-4) with the result of one rank, on any number of ranks.

    Orthogonalization needs complete matrices. The ranks that share the model take turns: each gathers and
    orthogonalizes one matrix of every `len(ranks)` matrices, and sends the result to the others. Momentum and weights
    remain sharded.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            size = _count_shards(parameters[0]) if parameters else 1
            for start in range(0, len(parameters), size):
                turn = slice(start, start + size)
                updates = [
                    _update_momentum(gradient, momentum, group["momentum"])
                    for gradient, momentum in zip(gradients[turn], momenta[turn], strict=True)
                ]
                for parameter, update in zip(parameters[turn], _orthogonalize(updates, group), strict=True):
                    shard, scale = local_tensor(parameter), _adjust_lr(group["lr"], "match_rms_adamw", parameter.shape)
                    shard.mul_(1 - group["lr"] * group["weight_decay"])
                    shard.add_(local_tensor(update).to(shard.device), alpha=-scale)


def _update_momentum(gradient: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """Update the momentum in place, and return Nesterov's update in bfloat16, in which it is orthogonalized."""
    momentum.lerp_(gradient, 1 - decay)
    return gradient.lerp(momentum, decay).bfloat16()


def _orthogonalize(updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Orthogonalize up to one matrix per rank, and shard the results like the matrices (a collective)."""
    own = None
    rank = _get_shard_rank(updates[0])
    for owner, update in enumerate(updates):
        matrix = full_tensor(update)
        own = matrix if owner == rank else own
    if own is not None:
        own = _zeropower_via_newtonschulz(own, group["ns_coefficients"], group["ns_steps"], group["eps"]).contiguous()
    return [_send_to_shards(own if owner == rank else None, owner, update) for owner, update in enumerate(updates)]


def _send_to_shards(matrix: Tensor | None, owner: int, like: Tensor) -> Tensor:
    """Send a complete matrix from its owner to the ranks that share the model. `matrix`: None on other ranks."""
    if not isinstance(like, DTensor):
        assert matrix is not None
        return matrix
    mesh = like.device_mesh
    if matrix is None:
        matrix = torch.empty(like.shape, dtype=like.dtype, device=mesh.device_type)
    dist.broadcast(matrix, group=mesh.get_group("shard"), group_src=owner)
    return distribute_tensor(matrix, mesh, like.placements, src_data_rank=None)


def _count_shards(parameter: Tensor) -> int:
    return parameter.device_mesh["shard"].size() if isinstance(parameter, DTensor) else 1


def _get_shard_rank(parameter: Tensor) -> int:
    return parameter.device_mesh.get_local_rank("shard") if isinstance(parameter, DTensor) else 0
