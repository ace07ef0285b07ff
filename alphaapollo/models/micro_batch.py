"""The rows of one forward pass as tensors, padded or packed.

padded  [b, T]: each row starts at 0, zeros to its right. Causal attention never looks right, so no mask is needed.
packed  [1, sum T]: rows end to end; `cu_seqlens` says where each begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from alphaapollo.data.batch import Rows


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the rows of a packed micro-batch begin and end; compared by identity."""

    cu_seqlens: Tensor  # int32 [b + 1]
    lengths: list[int]  # [b]

    @property
    def max_length(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class MicroBatch:
    """b rows with n response tokens in all; a flat column [n] holds the responses end to end.

    A micro-batch without rows is built on a dummy of two tokens, one of them response, so that its rank takes part in
    the collectives of forward and backward. The dummy's mask and weights are zero.
    """

    token_ids: Tensor  # int64 [b, T] or [1, sum T]
    position_ids: Tensor  # int64 [1, T] or [1, sum T]
    packing: Packing | None  # None: padded
    states: Tensor  # int64 [n]: the flat position whose hidden state predicts each response token
    targets: Tensor  # int64 [n]: the response tokens
    rows: Rows  # what it was built from
    is_dummy: bool

    @cached_property
    def cells(self) -> Tensor:
        """int64 [n]: each response token's cell in the flattened response-aligned matrix [b, L]."""
        lengths = self.rows.response_lengths
        first = np.arange(len(lengths)) * lengths.max()
        return torch.from_numpy(np.repeat(first, lengths) + _counting(lengths)).to(self.targets.device)

    @cached_property
    def ends(self) -> Tensor:
        """int64 [b]: the flat position of each row's last token, which is its response's last."""
        last = np.cumsum(self.rows.response_lengths) - 1
        return self.states[torch.from_numpy(last).to(self.states.device)] + 1

    def to_matrix(self, flat: Tensor) -> Tensor:
        """A flat column [n] -> the response-aligned matrix [b, L], zero beyond each response; differentiable."""
        shape = len(self.rows), int(self.rows.response_lengths.max())
        return flat.new_zeros(shape[0] * shape[1]).index_copy(0, self.cells, flat).view(shape)

    def tensor(self, column: np.ndarray) -> Tensor:
        """The rows' part of a column, [n] or [b], as float32 on the device; a zero for the dummy."""
        column = np.zeros(1) if self.is_dummy else column
        return torch.from_numpy(column.astype(np.float32)).to(self.targets.device)

    def matrix(self, column: np.ndarray) -> Tensor:
        """The rows' part of a flat column [n] -> [b, L]."""
        return self.to_matrix(self.tensor(column))

    def values(self, flat: Tensor) -> np.ndarray:
        """A computed flat column [n] as it travels to the driver; without the dummy."""
        return (flat[:0] if self.is_dummy else flat).float().cpu().numpy()


def build_micro_batch(rows: Rows, positions: Sequence[int], padded: bool, device: torch.device) -> MicroBatch:
    """The rows at `positions` as one micro-batch on `device`; the dummy if there are none."""
    is_dummy = not len(positions)
    chosen = _DUMMY if is_dummy else rows.select(positions)
    lengths, responses = chosen.lengths, chosen.response_lengths
    starts = chosen.token_offsets[:-1]
    response_tokens = np.repeat(starts + chosen.response_starts, responses) + _counting(responses)
    if padded:
        width = int(lengths.max())
        token_ids = np.zeros((len(lengths), width), dtype=np.int64)
        token_ids[np.arange(width) < lengths[:, None]] = chosen.token_ids
        states = response_tokens - 1 + np.repeat(np.arange(len(lengths)) * width - starts, responses)
        position_ids, packing = np.arange(width), None
    else:
        token_ids = chosen.token_ids[None]
        states = response_tokens - 1
        position_ids = _counting(lengths)
        cu_seqlens = torch.from_numpy(chosen.token_offsets.astype(np.int32)).to(device)
        packing = Packing(cu_seqlens, lengths.tolist())
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        position_ids=torch.from_numpy(position_ids[None]).to(device),
        packing=packing,
        states=torch.from_numpy(states).to(device),
        targets=torch.from_numpy(chosen.token_ids[response_tokens]).to(device),
        rows=chosen,
        is_dummy=is_dummy,
    )


def _counting(lengths: np.ndarray) -> np.ndarray:
    """0, 1, .. n_i - 1 for each length n_i, end to end."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


_DUMMY = Rows(
    token_ids=np.zeros(2, dtype=np.int64),
    lengths=np.array([2], dtype=np.int64),
    response_starts=np.array([1], dtype=np.int64),
    action_mask=np.zeros(1, dtype=np.uint8),
    rollout_logprobs=np.zeros(1, dtype=np.float32),
)
