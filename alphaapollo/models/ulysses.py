"""Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): the ranks of a group share every sequence.

Outside attention a rank computes its part of the tokens. Inside attention it computes its part of the heads, for all
tokens:

    [b, heads, T/s, d] --all-to-all--> [b, heads/s, T, d] -> attention
                       -> [b, T, heads/s, d] --all-to-all--> [b, T/s, heads, d]

At the end, log-probs or values are gathered from all ranks. Each rank of a group then computes the complete loss and
the gradients of its part of the tokens. These gradients add up over the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class SequenceGroup:
    """Consecutive ranks that split every sequence among them."""

    group: dist.ProcessGroup
    rank: int  # rank within the group
    size: int

    def get_token_range(self, num_tokens: int) -> slice:
        """Return the range of this rank's tokens in a sequence of `num_tokens` tokens."""
        count = num_tokens // self.size
        return slice(self.rank * count, (self.rank + 1) * count)


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


def find_local_positions(
    positions: np.ndarray, num_columns: int, rank: int, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens of a rank if an array [b, C] is split by columns. `positions`: tokens in the flattened array.
    Returns their positions in the rank's flattened part [b, C / num_ranks], and their indices in `positions`."""
    rows, columns = np.divmod(positions, num_columns)
    part_width = num_columns // num_ranks
    indices = np.flatnonzero(columns // part_width == rank)
    return rows[indices] * part_width + columns[indices] % part_width, indices


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


def describe_stateful_layers(config: PretrainedConfig) -> str:
    """Describe the layer types in config.json that carry state along the sequence outside of attention, for messages;
    empty if there are none."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or [])
    stateful = ", ".join(sorted(kinds - {"full_attention", "sliding_attention"}))
    return f"has layers of type {stateful}, which carry state along the sequence" if stateful else ""


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
