"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): the ranks of a group share every sequence.

Outside of attention a rank computes its part of the tokens, inside its part of the heads, of all tokens:

    [b, heads, T/s, d] --exchange--> [b, heads/s, T, d] -> attention
                       -> [b, T, heads/s, d] --exchange--> [b, T/s, heads, d]

What a rank makes of its tokens (log-probs, values) is gathered at the end, so each rank of a group has the whole loss,
and the gradients of its own tokens: those add up over the group.
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
    """The ranks that share every sequence: consecutive ones."""

    group: dist.ProcessGroup
    rank: int  # in the group
    size: int

    def part(self, width: int) -> slice:
        """This rank's tokens of so many."""
        own = width // self.size
        return slice(self.rank * own, (self.rank + 1) * own)


@dataclass(frozen=True)
class Positions:
    """Where the states of p tokens stand on this rank, by flat position."""

    local: Tensor  # int64 [m]: in its part of the micro-batch
    own: Tensor | None  # int64 [m]: which of the p those are; None: all
    count: int  # p


def sequence_groups(device: str, size: int) -> tuple[SequenceGroup | None, dist.ProcessGroup | None]:
    """This rank's group, and the ranks that together have every row once (None: all). A collective."""
    if size == 1:
        return None, None
    assert dist.get_world_size() % size == 0, "config/check_parallelism.py sees to it"
    mesh = init_device_mesh(device, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
    return SequenceGroup(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size), mesh.get_group("data")


def local_positions(flat: np.ndarray, width: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of tokens at `flat` positions of [b, width]: the positions of a rank's own in its [b, width / size], and which of
    them those are."""
    rows, columns = np.divmod(flat, width)
    own_width = width // size
    own = np.flatnonzero(columns // own_width == rank)
    return rows[own] * own_width + columns[own] % own_width, own


def heads_of_all_tokens(x: Tensor, sequence: SequenceGroup) -> Tensor:
    """[b, heads, T/s, d] -> [b, heads/s, T, d]. Fewer heads than ranks, or a number that they do not divide, are
    repeated: [b, lcm(heads, s)/s, T, d]."""
    repeats = sequence.size // math.gcd(sequence.size, x.shape[1])
    return _exchange(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x, 1, 2, sequence)


def tokens_of_all_heads(x: Tensor, sequence: SequenceGroup) -> Tensor:
    """[b, T, heads/s, d] -> [b, T/s, heads, d]"""
    return _exchange(x, 1, 2, sequence)


def gather(local: Tensor, positions: Positions, sequence: SequenceGroup | None) -> Tensor:
    """What each rank has of p tokens, together on every rank. [k, m] -> [k, p]; differentiable: every rank must compute
    the same from it, and gets the gradient of its own."""
    if sequence is None:
        return local
    whole: Tensor = _Gather.apply(local, positions.own, positions.count, sequence)
    return whole


def kinds_with_state(config: PretrainedConfig) -> set[str]:
    """Kinds of layers that carry something from token to token outside of attention, as far as config.json says."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    return set(kinds) - {"full_attention", "sliding_attention"}


def check_splits(config: PretrainedConfig, what: str, size: int, ranks: int, key: str, own_code: bool) -> None:
    """ValueError: a model whose layers cannot be computed by parts.

    Args:
        what: the model with its key, for messages.
        key: that asks for `size` of the `ranks` to work together.
        own_code: the model is Python code of its own folder, which may not hand attention on to us.
    """
    text = config.get_text_config()
    heads, fix = getattr(text, "num_attention_heads", 0), f"Set {key}=1."
    if heads % size or not heads:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if heads % n == 0 and ranks % n == 0) if heads else "1"
        raise ValueError(
            f"{key}={size}: {what} has {heads} attention heads, which {size} ranks cannot share. Of {ranks} ranks, set "
            f"one of {fits}."
        )
    kinds = kinds_with_state(config)
    if kinds:
        raise ValueError(
            f"{key}={size}: {what} has layers of kind {', '.join(sorted(kinds))}, which carry "
            f"a state from token to token. {fix}"
        )
    if own_code:
        raise ValueError(f"{key}={size}: {what} brings its own code, whose attention cannot be split. {fix}")
    kinds = set(_rope_types(getattr(text, "rope_parameters", None) or {})) & {"dynamic", "longrope"}
    if kinds:
        raise ValueError(
            f"{key}={size}: {what} has {kinds.pop()} position embeddings, which depend on the "
            f"longest row that a rank sees. {fix}"
        )


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    """Also of models that have some for each kind of layer."""
    nested = [_rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return [str(parameters.get("rope_type", "default")), *(kind for kinds in nested for kind in kinds)]


def _exchange(x: Tensor, split: int, join: int, sequence: SequenceGroup) -> Tensor:
    """Rank r gets the r-th part of dimension `split` from every rank, laid end to end along `join`."""
    exchanged: Tensor = _Exchange.apply(x, split, join, sequence)
    return exchanged


class _Exchange(torch.autograd.Function):
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
    def forward(ctx: Any, local: Tensor, own: Tensor, count: int, sequence: SequenceGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = local.new_zeros(local.shape[0], count).index_copy_(1, own, local)
        dist.all_reduce(whole, group=sequence.group)  # each number comes from one rank: a sum with zeros is exact
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return grad.index_select(1, own), None, None, None
