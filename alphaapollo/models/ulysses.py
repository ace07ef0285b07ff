"""Ulysses sequence parallelism (arXiv 2309.14509): consecutive ranks split every sequence among them.

Inside attention, each rank has all tokens, but only its part of the heads. An all-to-all before attention exchanges
tokens for heads, and one after attention exchanges them back. Values of response tokens, e.g. log-probs and masks, are
complete on every rank: each rank computes the complete loss, and its gradient from the rank's own tokens. These
gradients add up over the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class SequenceGroup:
    """Consecutive ranks that split every sequence among them."""

    group: dist.ProcessGroup
    rank: int  # rank within the group
    size: int


@dataclass(frozen=True)
class TokenSelection:
    """Selected tokens of a micro-batch: p over all ranks of the sequence group, m of them on this rank."""

    shard_positions: Tensor  # int64 [m]: positions in the rank's part of the micro-batch, flattened
    selection_indices: Tensor | None  # int64 [m]: which of the p tokens this rank has; None: all, in order
    num_selected: int  # p


def create_sequence_groups(device: str, size: int) -> tuple[SequenceGroup | None, dist.ProcessGroup | None]:
    """Create this rank's sequence-parallel group, and its data-parallel group with one rank of each sequence-parallel
    group (a collective). Returns (None, None) if `size` is 1."""
    if size == 1:
        return None, None
    mesh = init_device_mesh(device, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
    return SequenceGroup(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size), mesh.get_group("data")


def exchange_tokens_for_heads(x: Tensor, sequence: SequenceGroup) -> Tensor:
    """Exchange this rank's part of the tokens for its part of the heads. [b, heads, T/s, d] -> [b, heads/s, T, d], or
    [b, lcm(heads, s)/s, T, d] with repeated heads if s does not divide the number of heads."""
    repeats = sequence.size // math.gcd(sequence.size, x.shape[1])
    return _all_to_all(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x, 1, 2, sequence)


def exchange_heads_for_tokens(x: Tensor, sequence: SequenceGroup) -> Tensor:
    """Exchange this rank's part of the heads for its part of the tokens. [b, T, heads/s, d] -> [b, T/s, heads, d]"""
    return _all_to_all(x, 1, 2, sequence)


def gather_token_values(local: Tensor, selection: TokenSelection, sequence: SequenceGroup | None) -> Tensor:
    """Gather k values per selected token: [k, m] of this rank's m tokens -> [k, p] of the sequence group's p tokens.
    Differentiable if all ranks compute the same loss; each rank gets the gradient of its m tokens."""
    if sequence is None:
        return local
    gathered: Tensor = _GatherTokens.apply(local, selection.selection_indices, selection.num_selected, sequence)
    return gathered


def _all_to_all(x: Tensor, split_dim: int, join_dim: int, sequence: SequenceGroup) -> Tensor:
    """Differentiable all-to-all exchange. Rank r gets the r-th part of dimension `split_dim` from every rank, and
    concatenates the parts along dimension `join_dim`."""
    parts = x.unflatten(split_dim, (sequence.size, -1)).movedim(split_dim, 0).contiguous()
    received: Tensor = all_to_all_single_autograd(parts, None, None, sequence.group)
    return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, indices: Tensor, count: int, sequence: SequenceGroup) -> Tensor:
        ctx.save_for_backward(indices)
        gathered = local.new_zeros(local.shape[0], count).index_copy_(1, indices, local)
        dist.all_reduce(gathered, group=sequence.group)  # exact: all but one rank add zero for a token
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return grad.index_select(1, indices), None, None, None
