"""Padded attention over rows that share prefixes: token indices and masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from alphaapollo.models.micro_batch import Packing


@dataclass(frozen=True)
class PaddedCells:
    """Padded matrices of flat token positions. Padding repeats a segment's last token; its output is unused."""

    prefixes: Tensor  # int64 [f, P]: tokens of each shared prefix
    remainders: Tensor  # int64 [b, C]: tokens of each row after its prefix
    keys: Tensor  # int64 [b, P + C]: tokens of the row's prefix, then of its remainder
    visible: Tensor  # bool [b, 1, C, P + C]: attention mask, from tokens of the remainder to keys
    inverse: Tensor  # int64 [sum T]: index of each token among the flattened cells of prefixes, then remainders


@lru_cache(maxsize=2)  # shared by the layers of a forward pass: full and sliding-window attention
def compute_padded_cells(packing: Packing, window: int | None) -> PaddedCells:
    """Compute the cells of a micro-batch with shared prefixes. `window` is the sliding window of AttentionCall."""
    assert packing.keys is not None, "rows without shared prefixes are padded when the batch is built"
    lengths, prefix_index = np.array(packing.lengths), np.array(packing.keys.prefixes)
    starts = np.cumsum(lengths) - lengths
    segments = np.arange(len(lengths))
    prefixes, remainders = segments[prefix_index == segments], segments[prefix_index != segments]
    prefix_lengths = lengths[prefix_index[remainders]]
    prefix_cells = _pad_segments(starts[prefixes], lengths[prefixes])
    remainder_cells = _pad_segments(starts[remainders], lengths[remainders])
    row_prefix_cells = _pad_segments(starts[prefix_index[remainders]], prefix_lengths)
    query, key = np.arange(remainder_cells.shape[1]), np.arange(row_prefix_cells.shape[1])
    is_prefix_visible = np.broadcast_to(key < prefix_lengths[:, None, None], (len(remainders), len(query), len(key)))
    distance = query[:, None] - query
    is_remainder_visible = np.broadcast_to(distance >= 0, (len(remainders), *distance.shape))
    if window is not None:
        is_prefix_visible = is_prefix_visible & (prefix_lengths[:, None, None] + query[:, None] - key < window)
        is_remainder_visible = is_remainder_visible & (distance < window)
    cells = np.concatenate([prefix_cells.ravel(), remainder_cells.ravel()])
    inverse = np.empty(lengths.sum(), dtype=np.int64)
    inverse[cells[::-1]] = np.arange(len(cells))[::-1]  # a repeated position gets its first cell, which is not padding
    device = packing.cu_seqlens.device
    return PaddedCells(
        prefixes=torch.from_numpy(prefix_cells).to(device),
        remainders=torch.from_numpy(remainder_cells).to(device),
        keys=torch.from_numpy(np.concatenate([row_prefix_cells, remainder_cells], axis=1)).to(device),
        visible=torch.from_numpy(np.concatenate([is_prefix_visible, is_remainder_visible], axis=2)[:, None]).to(device),
        inverse=torch.from_numpy(inverse).to(device),
    )


def causal_mask(width: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Make the causal mask of the last `width` of `num_keys` tokens, true where visible. bool [width, num_keys]"""
    query = torch.arange(num_keys - width, num_keys, device=device)
    distance = query[:, None] - torch.arange(num_keys, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def flatten_heads(x: Tensor) -> Tensor:
    """Reshape [1, heads, T, d] -> [T, heads x d]."""
    return x[0].transpose(0, 1).flatten(1)


def gather_heads(tokens: Tensor, cells: Tensor, heads: int) -> Tensor:
    """Gather the tokens [T, heads x d] at `cells` [b, w] -> [b, heads, w, d].

    F.embedding has a backward pass that is fast on a CPU and deterministic on a GPU.
    """
    return F.embedding(cells, tokens).unflatten(2, (heads, -1)).transpose(1, 2)


def _pad_segments(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the flat positions of n segments, padded with each segment's last token. [n], [n] -> [n, longest]"""
    return starts[:, None] + np.minimum(np.arange(lengths.max(initial=1)), lengths[:, None] - 1)
