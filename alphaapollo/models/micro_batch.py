"""The rows of one forward pass as tensors, padded or packed.

padded  [b, T]: each row starts at 0, zeros to its right. Causal attention never looks right, so no mask is needed.
packed  [1, sum T]: rows end to end; `cu_seqlens` says where each begins.
shared  [1, sum T]: packed, what rows have in common before them and only once: prefixes, then the rest of each row,
        which sees its prefix, too (data/shared_prompts.py). Also where rows are else padded.

Where ranks share sequences (models/ulysses.py) each has its part of T, which is then padded to a multiple of them;
columns, mask and matrices are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from alphaapollo.data.batch import Columns, Rows, segment_offsets
from alphaapollo.data.shared_prompts import Prefixes
from alphaapollo.models.ulysses import Positions, SequenceGroup, gather, local_positions
from alphaapollo.models.upload import upload
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass(frozen=True)
class Keys:
    """What each of s segments sees: the tokens of its prefix, which is another segment, then its own up to the one that
    looks. A segment without a prefix names itself."""

    prefixes: list[int]  # [s]: each one's prefix
    lengths: list[int]  # [s]: tokens of prefix and segment
    cu_seqlens: Tensor  # int32 [s + 1]
    index: Tensor  # int64 [sum lengths]: where these tokens stand, segment after segment

    @property
    def max_length(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the segments of a packed micro-batch begin and end: its rows, or shared prefixes and the rest of each row.
    Compared by identity."""

    cu_seqlens: Tensor  # int32 [s + 1]
    lengths: list[int]  # [s]
    keys: Keys | None = None  # None: each sees itself alone

    @property
    def max_length(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class MicroBatch:
    """b rows with n response tokens in all; a flat column [n] holds the responses end to end.

    A micro-batch without rows is built on a dummy of two tokens, one of them response, so that its rank takes part in
    the collectives of forward and backward. The dummy's mask and weights are zero.
    """

    token_ids: Tensor  # int64 [b, T] or [1, sum T], this rank's part of T; sum T counts what is shared once
    position_ids: Tensor  # int64 [1, T] or [1, sum T], likewise
    is_real: Tensor  # bool, as token_ids: a token of a row; not padding, not the dummy
    routed_experts: Tensor | None  # integers, as token_ids, [.., L, k]: see data.batch.Rows
    packing: Packing | None  # of whole segments; None: padded
    states: Positions  # n: whose hidden state predicts each response token
    ends: Positions  # b: each row's last token, which is its response's last
    targets: Tensor  # int64 [m]: the response tokens that this rank's states predict
    cells: Tensor  # int64 [n]: each response token's cell in the flattened response-aligned matrix [b, L]
    mask: Tensor  # float32 [n]: 1 on action tokens
    rollout_logprobs: Tensor  # float32 [n]: the engine's
    columns: Columns[Tensor]  # those given, of its rows, on the device; trajectory_ids only where rows share one
    rows: Rows  # what it was built from
    is_dummy: bool
    sequence: SequenceGroup | None

    def to_matrix(self, flat: Tensor) -> Tensor:
        """A flat column [n] -> the response-aligned matrix [b, L], zero beyond each response; differentiable."""
        shape = len(self.rows), int(self.rows.response_lengths.max())
        return flat.new_zeros(shape[0] * shape[1]).index_copy(0, self.cells, flat).view(shape)

    def gather(self, local: Tensor, positions: Positions) -> Tensor:
        """What this rank computed of `positions` (states or ends), with that of those who share its sequences.
        [k, m] -> [k, p]"""
        return gather(local, positions, self.sequence)

    def values(self, flat: Tensor) -> Tensor:
        """A computed flat column [n] without the dummy."""
        return flat.detach()[: 0 if self.is_dummy else None]


def build_micro_batch(
    rows: Rows,
    positions: Sequence[int],
    padded: bool,
    device: torch.device,
    columns: Columns[np.ndarray] | None = None,
    sequence: SequenceGroup | None = None,
) -> MicroBatch:
    """The rows at `positions` as one micro-batch on `device`; the dummy if there are none. One copy takes it there,
    which waits for nothing.

    Args:
        columns: beside `rows`, what is needed of them.
        sequence: the ranks that share it.
    """
    HEARTBEAT.tick()
    is_dummy = not len(positions)
    chosen = _DUMMY if is_dummy else rows.select(positions)
    given = _of_dummy(columns) if columns and is_dummy else columns.select(rows, positions) if columns else Columns()
    layout = _lay_out(chosen, padded, sequence)
    responses = chosen.response_lengths
    token_index = np.repeat(chosen.token_offsets[:-1] + chosen.response_starts, responses) + _counting(responses)
    states, own_states = layout.places(token_index - 1)
    ends, own_ends = layout.places(chosen.token_offsets[1:] - 1)
    targets = chosen.token_ids[token_index]
    sent = {
        "token_ids": layout.token_ids[:, layout.part],
        "position_ids": layout.position_ids[None, layout.part],
        "is_real": layout.is_real[:, layout.part] & (not is_dummy),
        "cu_seqlens": segment_offsets(layout.lengths).astype(np.int32),
        **layout.keys(),
        "states": states,
        "own_states": own_states,
        "ends": ends,
        "own_ends": own_ends,
        "targets": targets[own_states],
        "cells": np.repeat(np.arange(len(chosen)) * responses.max(), responses) + _counting(responses),
        "mask": chosen.action_mask.astype(np.float32),
        "rollout_logprobs": chosen.rollout_logprobs.astype(np.float32),
    }
    if rows.routed_experts is not None:
        sent["routed_experts"] = layout.lay_out(_experts(rows, chosen))[:, layout.part]
    there = upload(sent | _columns_to_send(given), device)
    return MicroBatch(
        token_ids=there["token_ids"],
        position_ids=there["position_ids"],
        is_real=there["is_real"],
        routed_experts=there.get("routed_experts"),
        packing=None if layout.is_padded else layout.packing(there),
        states=Positions(there["states"], there["own_states"] if sequence else None, len(targets)),
        ends=Positions(there["ends"], there["own_ends"] if sequence else None, len(chosen)),
        targets=there["targets"],
        cells=there["cells"],
        mask=there["mask"],
        rollout_logprobs=there["rollout_logprobs"],
        columns=Columns(**{name: tensor for name, tensor in there.items() if name not in sent}),
        rows=chosen,
        is_dummy=is_dummy,
        sequence=sequence,
    )


@dataclass(frozen=True)
class _Layout:
    """Rows laid out in tokens, and a rank's part of them."""

    token_ids: np.ndarray  # int64 [b, T] or [1, T], whole
    position_ids: np.ndarray  # int64 [T]
    is_real: np.ndarray  # bool, as token_ids
    flat: np.ndarray  # int64 [sum T of the rows]: where each token of the rows stands
    lengths: np.ndarray  # int64 [s], of segments; packed: one more where T was padded
    prefixes: np.ndarray | None  # int64 [s], each one's prefix, where rows share
    is_padded: bool
    sequence: SequenceGroup | None

    @property
    def part(self) -> slice:
        width = self.token_ids.shape[1]
        return self.sequence.part(width) if self.sequence else slice(0, width)

    def lay_out(self, values: np.ndarray) -> np.ndarray:
        """What stands beside the rows' tokens, as token_ids; zero where there is none. [sum T, ..] -> [b, T, ..]"""
        there = np.zeros((self.token_ids.size, *values.shape[1:]), dtype=values.dtype)
        there[self.flat] = values
        return there.reshape(*self.token_ids.shape, *values.shape[1:])

    def places(self, token_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens by their index in the rows: the flat positions of a rank's own, and which of them those are."""
        flat = self.flat[token_index]
        if self.sequence is None:
            return flat, np.arange(len(flat))
        return local_positions(flat, self.token_ids.shape[1], self.sequence.rank, self.sequence.size)

    def keys(self) -> dict[str, np.ndarray]:
        """What Keys needs on the device; nothing where no row shares."""
        if self.prefixes is None:
            return {}
        starts, before = segment_offsets(self.lengths)[:-1], self._before(self.prefixes)
        ranges = np.stack([starts[self.prefixes], starts], axis=1).ravel()
        sizes = np.stack([before, self.lengths], axis=1).ravel()
        return {
            "key_index": np.repeat(ranges, sizes) + _counting(sizes),
            "key_cu_seqlens": segment_offsets(before + self.lengths).astype(np.int32),
        }

    def packing(self, there: dict[str, Tensor]) -> Packing:
        """`there`: what of it is on the device."""
        lengths, keys = self.lengths.tolist(), None
        if self.prefixes is not None:
            seen = (self._before(self.prefixes) + self.lengths).tolist()
            keys = Keys(self.prefixes.tolist(), seen, there["key_cu_seqlens"], there["key_index"])
        return Packing(there["cu_seqlens"], lengths, keys)

    def _before(self, prefixes: np.ndarray) -> np.ndarray:
        """Tokens of each segment's prefix. int64 [s]"""
        return np.where(prefixes == np.arange(len(prefixes)), 0, self.lengths[prefixes])


def _lay_out(rows: Rows, padded: bool, sequence: SequenceGroup | None) -> _Layout:
    size = sequence.size if sequence else 1
    if rows.prefixes is not None:
        return _share(rows, rows.prefixes, size, sequence)
    lengths = rows.lengths
    needed = int(lengths.max() if padded else lengths.sum())
    width = -(-needed // size) * size
    if padded:
        token_ids = np.zeros((len(lengths), width), dtype=np.int64)
        is_real = np.arange(width) < lengths[:, None]
        position_ids, flat = np.arange(width), np.flatnonzero(is_real)
    else:
        lengths = np.append(lengths, width - needed) if width > needed else lengths
        token_ids = np.zeros((1, width), dtype=np.int64)
        is_real = np.arange(width)[None] < needed
        position_ids, flat = _counting(lengths), np.arange(needed)
    token_ids[is_real] = rows.token_ids
    return _Layout(token_ids, position_ids, is_real, flat, lengths, None, padded, sequence)


def _share(rows: Rows, prefixes: Prefixes, size: int, sequence: SequenceGroup | None) -> _Layout:
    """Prefixes, then the rest of each row; `size`: what the width must be a multiple of."""
    _, first, family = np.unique(prefixes.ids, return_index=True, return_inverse=True)
    shared, own = prefixes.lengths[first], rows.lengths - prefixes.lengths
    lengths = np.concatenate([shared, own])
    needed = int(lengths.sum())
    width = -(-needed // size) * size
    starts = segment_offsets(lengths)[:-1]
    within = _counting(rows.lengths)  # of each row's token: its position in the row
    before = np.repeat(prefixes.lengths, rows.lengths)
    rest = np.repeat(starts[len(first) :], rows.lengths) + within - before
    flat = np.where(within < before, np.repeat(starts[family], rows.lengths) + within, rest)
    token_ids, position_ids = np.zeros((1, width), dtype=np.int64), np.zeros(width, dtype=np.int64)
    token_ids[0, flat], position_ids[flat] = rows.token_ids, within
    segments = np.concatenate([np.arange(len(first)), family])
    if width > needed:
        lengths, segments = np.append(lengths, width - needed), np.append(segments, len(segments))
    is_real = np.arange(width)[None] < needed
    return _Layout(token_ids, position_ids, is_real, flat, lengths, segments, False, sequence)


def _experts(rows: Rows, chosen: Rows) -> np.ndarray:
    """Of the chosen rows, or of the dummy's two tokens; torch computes little with numpy's uint16."""
    assert rows.routed_experts is not None
    experts = chosen.routed_experts
    if experts is None:
        experts = np.zeros((2, *rows.routed_experts.shape[1:]), dtype=rows.routed_experts.dtype)
    return experts.astype(np.int32) if experts.dtype == np.uint16 else experts


def _columns_to_send(given: Columns[np.ndarray]) -> dict[str, np.ndarray]:
    """As float32 (float64 stays), but for ids, which only matter where rows share one."""
    columns = {one.name: getattr(given, one.name) for one in fields(given) if getattr(given, one.name) is not None}
    ids = columns.pop("trajectory_ids", np.zeros(0))
    sent = {name: column.astype(np.promote_types(column.dtype, np.float32)) for name, column in columns.items()}
    return sent | ({"trajectory_ids": ids} if len(np.unique(ids)) < len(ids) else {})


def _of_dummy(columns: Columns[np.ndarray]) -> Columns[np.ndarray]:
    """A zero in each column that there is."""
    there = {one.name: getattr(columns, one.name) for one in fields(columns)}
    return Columns(**{name: np.zeros(1, column.dtype) for name, column in there.items() if column is not None})


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
