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
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class SequenceGroup:
    """Consecutive ranks that share every sequence."""

    group: dist.ProcessGroup
    rank: int  # rank within the group
    size: int

    def get_token_range(self, width: int) -> slice:
        """Return the range of this rank's tokens among `width` tokens."""
        count = width // self.size
        return slice(self.rank * count, (self.rank + 1) * count)


@dataclass(frozen=True)
class LocalTokens:
    """Selection of p tokens of a micro-batch, of which this rank has m."""

    local: Tensor  # int64 [m]: flat positions in the rank's part of the micro-batch
    indices: Tensor | None  # int64 [m]: indices of this rank's tokens among the p tokens; None: m = p
    count: int  # p


def create_sequence_groups(device: str, size: int) -> tuple[SequenceGroup | None, dist.ProcessGroup | None]:
    """Create this rank's sequence group and the group of ranks that have every row once (a collective; None: all)."""
    if size == 1:
        return None, None
    assert dist.get_world_size() % size == 0, "the configuration checks this"
    mesh = init_device_mesh(device, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
    return SequenceGroup(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size), mesh.get_group("data")


def find_local_positions(flat: np.ndarray, width: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Find a rank's tokens among the flat positions `flat` in [b, width]. Returns the tokens' flat positions in the
    rank's part [b, width / size], and their indices in `flat`."""
    rows, columns = np.divmod(flat, width)
    part_width = width // size
    indices = np.flatnonzero(columns // part_width == rank)
    return rows[indices] * part_width + columns[indices] % part_width, indices


def exchange_tokens_for_heads(x: Tensor, sequence: SequenceGroup) -> Tensor:
    """Exchange [b, heads, T/s, d] -> [b, heads/s, T, d]. If s does not divide the number of heads, heads are repeated:
    [b, lcm(heads, s)/s, T, d]."""
    repeats = sequence.size // math.gcd(sequence.size, x.shape[1])
    exchanged: Tensor = _Exchange.apply(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x, 1, 2, sequence)
    return exchanged


def exchange_heads_for_tokens(x: Tensor, sequence: SequenceGroup) -> Tensor:
    """Exchange [b, T, heads/s, d] -> [b, T/s, heads, d]."""
    exchanged: Tensor = _Exchange.apply(x, 1, 2, sequence)
    return exchanged


def gather_columns(local: Tensor, tokens: LocalTokens, sequence: SequenceGroup | None) -> Tensor:
    """Gather the columns of p tokens on every rank of the group. [k, m] -> [k, p]

    Differentiable if all ranks compute the same loss from the result. Each rank gets the gradient of its m columns.
    """
    if sequence is None:
        return local
    gathered: Tensor = _Gather.apply(local, tokens.indices, tokens.count, sequence)
    return gathered


def find_stateful_layer_types(config: PretrainedConfig) -> set[str]:
    """Find the layer types in config.json that carry state along the sequence outside of attention."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    return set(kinds) - {"full_attention", "sliding_attention"}


def check_ulysses_support(config: PretrainedConfig, model_name: str, size: int, key: str, own_code: bool) -> None:
    """Raise ValueError if a model does not support sequence parallelism.

    Args:
        model_name: the model with its config key, for the message.
        size: number of ranks in a sequence group.
        key: config key that sets `size`.
        own_code: whether the model folder has modeling code, which may not support pluggable attention.
    """
    text = config.get_text_config()
    heads, possible, reason = getattr(text, "num_attention_heads", 0), 1, ""
    rope = set(_find_rope_types(getattr(text, "rope_parameters", None) or {})) & {"dynamic", "longrope"}
    if stateful := find_stateful_layer_types(config):
        reason = f"has layers of type {', '.join(sorted(stateful))}, which carry state along the sequence"
    elif own_code:
        reason = "has its own modeling code, whose attention cannot be split"
    elif rope:
        reason = f"has {rope.pop()} position embeddings, which depend on the longest row of a rank"
    elif heads % size or not heads:
        reason, possible = f"has {heads} attention heads", math.gcd(heads, size) if heads else 1
    if reason:
        raise ValueError(f"{key}={size} is not supported: {model_name} {reason}. Set {key}={possible}.")


def _find_rope_types(parameters: dict[str, Any]) -> list[str]:
    """Return the RoPE types of a model, which may differ between layer types."""
    nested = [_find_rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return [str(parameters.get("rope_type", "default")), *(kind for kinds in nested for kind in kinds)]


class _Exchange(torch.autograd.Function):
    """All-to-all exchange. Rank r gets the r-th part of dimension `split` of all ranks, concatenated along `join`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, sequence: SequenceGroup) -> Tensor:
        ctx.split, ctx.join, ctx.sequence = split, join, sequence
        return _all_to_all(x, split, join, sequence)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.join, ctx.split, ctx.sequence), None, None, None


def _all_to_all(x: Tensor, split: int, join: int, sequence: SequenceGroup) -> Tensor:
    parts = x.unflatten(split, (sequence.size, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=sequence.group)
    return received.movedim(0, join).flatten(join, join + 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, indices: Tensor, count: int, sequence: SequenceGroup) -> Tensor:
        ctx.save_for_backward(indices)
        gathered = local.new_zeros(local.shape[0], count).index_copy_(1, indices, local)
        dist.all_reduce(gathered, group=sequence.group)  # exact: all but one rank add zero to a column
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return grad.index_select(1, indices), None, None, None
