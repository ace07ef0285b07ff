"""Where the tokens of shared prefixes and of the rest of their rows go when attention pads them: indices, and which
keys a query sees."""

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
    """Flat positions in the micro-batch. Padding repeats a segment's last token; nobody reads what comes of it."""

    prefixes: Tensor  # int64 [f, P]
    rests: Tensor  # int64 [b, C]
    keys: Tensor  # int64 [b, P + C]: of the rest's prefix, then of the rest
    visible: Tensor  # bool [b, 1, C, P + C]: which keys each token of the rest sees
    back: Tensor  # int64 [sum T]: where each token of the micro-batch stands among the cells of prefixes and rests


@lru_cache(maxsize=2)  # the layers of one forward pass share them: full and windowed attention
def padded_cells(packing: Packing, window: int | None) -> PaddedCells:
    """Of a micro-batch whose rows share prefixes. window: tokens that a token sees, itself included."""
    assert packing.keys is not None, "without shared prefixes rows are padded as a whole"
    lengths, prefix_of = np.array(packing.lengths), np.array(packing.keys.prefixes)
    starts = np.cumsum(lengths) - lengths
    own = np.arange(len(lengths))
    prefixes, rests = own[prefix_of == own], own[prefix_of != own]
    before = lengths[prefix_of[rests]]
    first, last = _cells(starts[prefixes], lengths[prefixes]), _cells(starts[rests], lengths[rests])
    ahead = _cells(starts[prefix_of[rests]], before)
    query, key = np.arange(last.shape[1]), np.arange(ahead.shape[1])
    seen = np.broadcast_to((key < before[:, None])[:, None], (len(rests), len(query), len(key)))
    distance = query[:, None] - query
    near = np.broadcast_to(distance >= 0, (len(rests), *distance.shape))
    if window is not None:
        seen = seen & (before[:, None, None] + query[:, None] - key < window)
        near = near & (distance < window)
    cells = np.concatenate([first.ravel(), last.ravel()])
    back = np.empty(lengths.sum(), dtype=np.int64)
    back[cells[::-1]] = np.arange(len(cells))[::-1]  # of a cell and those that repeat it the first, which is no padding
    device = packing.cu_seqlens.device
    return PaddedCells(
        prefixes=torch.from_numpy(first).to(device),
        rests=torch.from_numpy(last).to(device),
        keys=torch.from_numpy(np.concatenate([ahead, last], axis=1)).to(device),
        visible=torch.from_numpy(np.concatenate([seen, near], axis=2)[:, None]).to(device),
        back=torch.from_numpy(back).to(device),
    )


def visible(width: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """bool [width, seen]: which of the `seen` tokens each of the last `width` sees: itself and those before it, with a
    window itself and the window - 1 before it."""
    query = torch.arange(seen - width, seen, device=device)
    distance = query[:, None] - torch.arange(seen, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def tokens_of(x: Tensor) -> Tensor:
    """[1, heads, T, d] -> [T, heads x d]"""
    return x[0].transpose(0, 1).flatten(1)


def by_heads(tokens: Tensor, cells: Tensor, heads: int) -> Tensor:
    """The tokens [T, heads x d] that stand at `cells` [b, w] -> [b, heads, w, d]. As an embedding, whose backward pass
    is fast on a CPU and adds up in one order on a GPU."""
    return F.embedding(cells, tokens).unflatten(2, (heads, -1)).transpose(1, 2)


def _cells(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Flat positions of segments, padded with each one's last token. [n], [n] -> [n, longest]"""
    return starts[:, None] + np.minimum(np.arange(lengths.max(initial=1)), lengths[:, None] - 1)
