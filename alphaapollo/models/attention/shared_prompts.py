"""Padded attention over rows (token sequences) that share prompts: token indices and masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from alphaapollo.models.micro_batch import Packing


@dataclass(frozen=True)
class PaddedIndices:
    """Indices that gather packed tokens into padded matrices, for attention over b rows that share f prompts. A row's
    suffix is its part after the prompt. Padding repeats the last token of a prompt or suffix; its output is unused."""

    prompts: Tensor  # int64 [f, P]: tokens of each shared prompt
    suffixes: Tensor  # int64 [b, C]: tokens of each suffix
    suffix_keys: Tensor  # int64 [b, P + C]: tokens of the row's prompt, then of its suffix
    suffix_mask: Tensor  # bool [b, 1, C, P + C]: true where a suffix's token attends to a key
    token_positions: Tensor  # int64 [sum T]: position of each token in the flattened `prompts`, then `suffixes`


@lru_cache(maxsize=2)  # shared by the layers of a forward pass: full and sliding-window attention
def compute_padded_indices(packing: Packing, window: int | None) -> PaddedIndices:
    """Find which packed token is in each cell of the padded matrices of prompts and suffixes; make the attention mask.
    `window`: sliding window in tokens, or None."""
    assert packing.keys is not None, "rows without shared prompts are padded when the batch is built"
    lengths, prefix_index = np.array(packing.lengths), np.array(packing.keys.prefix_segments)
    starts = np.cumsum(lengths) - lengths
    segments = np.arange(len(lengths))
    prefixes, suffixes = segments[prefix_index == segments], segments[prefix_index != segments]
    prefix_lengths = lengths[prefix_index[suffixes]]
    prefix_cells = _pad_token_ranges(starts[prefixes], lengths[prefixes])
    suffix_cells = _pad_token_ranges(starts[suffixes], lengths[suffixes])
    row_prefix_cells = _pad_token_ranges(starts[prefix_index[suffixes]], prefix_lengths)
    query, key = np.arange(suffix_cells.shape[1]), np.arange(row_prefix_cells.shape[1])
    is_prefix_visible = np.broadcast_to(key < prefix_lengths[:, None, None], (len(suffixes), len(query), len(key)))
    distance = query[:, None] - query
    is_suffix_visible = np.broadcast_to(distance >= 0, (len(suffixes), *distance.shape))
    if window is not None:
        is_prefix_visible = is_prefix_visible & (prefix_lengths[:, None, None] + query[:, None] - key < window)
        is_suffix_visible = is_suffix_visible & (distance < window)
    mask = np.concatenate([is_prefix_visible, is_suffix_visible], axis=2)
    cells = np.concatenate([prefix_cells.ravel(), suffix_cells.ravel()])
    positions = np.empty(lengths.sum(), dtype=np.int64)
    positions[cells[::-1]] = np.arange(len(cells))[::-1]  # repeated positions get their first cell, not padding
    device = packing.cu_seqlens.device
    return PaddedIndices(
        prompts=torch.from_numpy(prefix_cells).to(device),
        suffixes=torch.from_numpy(suffix_cells).to(device),
        suffix_keys=torch.from_numpy(np.concatenate([row_prefix_cells, suffix_cells], axis=1)).to(device),
        suffix_mask=torch.from_numpy(mask[:, None]).to(device),
        token_positions=torch.from_numpy(positions).to(device),
    )


def make_causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Make a causal mask, with queries only at the last num_queries of the num_keys tokens. Returns bool
    [num_queries, num_keys], true where a query attends to a key. `window`: sliding window in tokens."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query[:, None] - torch.arange(num_keys, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def flatten_heads(x: Tensor) -> Tensor:
    """Reshape [1, heads, T, d] -> [T, heads x d]."""
    return x[0].transpose(0, 1).flatten(1)


def gather_and_split_heads(tokens: Tensor, indices: Tensor, num_heads: int) -> Tensor:
    """Gather tokens [T, heads x d] by their indices [b, w], and separate the heads -> [b, heads, w, d].

    F.embedding has a backward pass that is fast on a CPU and deterministic on a GPU.
    """
    return F.embedding(indices, tokens).unflatten(2, (num_heads, -1)).transpose(1, 2)


def _pad_token_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the token indices of n ranges, each padded by repeating its last index. [n], [n] -> [n, longest]"""
    return starts[:, None] + np.minimum(np.arange(lengths.max(initial=1)), lengths[:, None] - 1)
