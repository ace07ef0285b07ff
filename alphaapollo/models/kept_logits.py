"""Logits of the tokens that the sampler kept (utils/kept_tokens.py), for the output head (lm_head.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptLogits:
    """Tokens that the sampler kept at n positions, in host memory: one chunk at a time is copied to the device."""

    offsets: Tensor  # int64 [n + 1]: the ids of position i are ids[offsets[i]:offsets[i + 1]]; no ids: all tokens
    ids: Tensor  # int32 [offsets[n]]

    def find_left_out(self, chunk: slice, raw: Tensor, num_rows: int) -> Tensor:
        """Return a mask of the logits `raw` [c, V] that are left out. num_rows: V and, after it, padding, which may be
        among the kept tokens. bool [c, V]"""
        offsets = self.offsets[chunk.start : chunk.stop + 1]
        counts, first, last = offsets.diff(), int(offsets[0]), int(offsets[-1])
        positions = torch.arange(len(counts)).repeat_interleave(counts, output_size=last - first)
        is_restricted = (counts > 0).to(raw.device, non_blocking=True)
        left_out = is_restricted[:, None].repeat(1, num_rows)
        ids = self.ids[first:last].long().to(raw.device, non_blocking=True)
        left_out[positions.to(raw.device, non_blocking=True), ids] = False
        return left_out[:, : raw.shape[1]]
