"""Rows of one forward pass as tensors, padded or packed.

padded  [b, T]: each row starts at column 0, zeros on the right. Causal attention needs no mask for right padding.
packed  [1, sum T]: rows end to end; `cu_seqlens` has the row boundaries.
shared  [1, sum T]: packed, with each shared prefix once: prefixes, then the remainder of each row, which also attends
        to its prefix (data/shared_prompts.py). Used for padded attention, too, if rows share prefixes.

With sequence parallelism (models/ulysses.py) each rank has its part of T, padded to a multiple of the group size;
columns, mask and matrices are complete on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from alphaapollo.data.batch import Columns, Rows, segment_offsets
from alphaapollo.data.shared_prompts import Prefixes
from alphaapollo.models.ulysses import SequenceGroup, TokenPositions, gather, local_positions
from alphaapollo.utils.heartbeat import HEARTBEAT

ALIGNMENT = 16  # bytes, of each array in a device copy


@dataclass(frozen=True)
class SegmentKeys:
    """Attention keys of each of s segments: the tokens of its prefix, which is another segment, and its own tokens."""

    prefixes: list[int]  # [s]: index of each segment's prefix; a segment without prefix has its own index
    lengths: list[int]  # [s]: tokens of prefix and segment
    cu_seqlens: Tensor  # int32 [s + 1]
    index: Tensor  # int64 [sum lengths]: flat positions of these tokens, segment after segment

    @property
    def max_length(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, eq=False)
class Packing:
    """Segments of a packed micro-batch: its rows, or shared prefixes and row remainders. Compared by identity."""

    cu_seqlens: Tensor  # int32 [s + 1]
    lengths: list[int]  # [s]
    keys: SegmentKeys | None = None  # None: a segment attends to itself only

    @property
    def max_length(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class MicroBatch:
    """b rows with n response tokens in all. A flat column [n] has the responses end to end.

    A micro-batch without rows has a dummy row of two tokens, one of them response, so that its rank takes part in the
    collectives of forward and backward. The mask and weights of the dummy are zero.
    """

    token_ids: Tensor  # int64 [b, T] or [1, sum T], this rank's part of T; a shared prefix counts once
    position_ids: Tensor  # int64 [1, T] or [1, sum T], likewise
    is_real: Tensor  # bool, shape of token_ids: false for padding and the dummy
    routed_experts: Tensor | None  # integers, token_ids.shape + [L, k]: see data.batch.Rows
    packing: Packing | None  # of complete segments; None: padded
    states: TokenPositions  # n: tokens before the response tokens, with the states that predict them
    ends: TokenPositions  # b: last token of each row
    targets: Tensor  # int64 [m]: response tokens that this rank's states predict
    cells: Tensor  # int64 [n]: cell of each response token in the flattened response-aligned matrix [b, L]
    mask: Tensor  # float32 [n]: 1 on action tokens
    rollout_logprobs: Tensor  # float32 [n]: the engine's
    columns: Columns[Tensor]  # the given columns of its rows; trajectory_ids only if rows share one
    rows: Rows
    is_dummy: bool
    sequence: SequenceGroup | None

    def to_matrix(self, flat: Tensor) -> Tensor:
        """Scatter a flat column [n] into a response-aligned matrix [b, L], zero beyond each response."""
        shape = len(self.rows), int(self.rows.response_lengths.max())
        return flat.new_zeros(shape[0] * shape[1]).index_copy(0, self.cells, flat).view(shape)

    def gather(self, local: Tensor, positions: TokenPositions) -> Tensor:
        """Gather results at `positions` (states or ends) from the sequence-parallel group. [k, m] -> [k, p]"""
        return gather(local, positions, self.sequence)

    def without_dummy(self, flat: Tensor) -> Tensor:
        """Drop the dummy's entries from a computed flat column [n]."""
        return flat[: 0 if self.is_dummy else None]


@dataclass(frozen=True)
class MicroBatchBuilder:
    """Layout and device of the micro-batches of one model."""

    padded: bool
    device: torch.device
    sequence: SequenceGroup | None = None  # ranks that share every micro-batch

    def build(self, rows: Rows, positions: Sequence[int], columns: Columns[np.ndarray] | None = None) -> MicroBatch:
        """Build the micro-batch of the rows at `positions`, with their part of `columns`."""
        return build_micro_batch(rows, positions, self.padded, self.device, columns, self.sequence)


def build_micro_batch(
    rows: Rows,
    positions: Sequence[int],
    padded: bool,
    device: torch.device,
    columns: Columns[np.ndarray] | None = None,
    sequence: SequenceGroup | None = None,
) -> MicroBatch:
    """Build the micro-batch of the rows at `positions` (the dummy if there are none), with one asynchronous copy.

    Args:
        columns: columns of `rows`; the micro-batch gets those of its own rows.
        sequence: ranks that share the micro-batch.
    """
    HEARTBEAT.tick()
    is_dummy = not len(positions)
    chosen = _DUMMY if is_dummy else rows.select(positions)
    columns = columns or Columns()
    given = _zero_columns(columns) if is_dummy else columns.select(rows, positions)
    layout = _lay_out(chosen, padded, sequence)
    responses = chosen.response_lengths
    token_index = np.repeat(chosen.token_offsets[:-1] + chosen.response_starts, responses) + _counting(responses)
    states, own_states = layout.find_tokens(token_index - 1)
    ends, own_ends = layout.find_tokens(chosen.token_offsets[1:] - 1)
    targets = chosen.token_ids[token_index]
    arrays = {
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
        arrays["routed_experts"] = layout.place(_routed_experts(rows, chosen))[:, layout.part]
    tensors = copy_to_device(arrays | _columns_to_copy(given), device)
    return MicroBatch(
        token_ids=tensors["token_ids"],
        position_ids=tensors["position_ids"],
        is_real=tensors["is_real"],
        routed_experts=tensors.get("routed_experts"),
        packing=None if layout.is_padded else layout.packing(tensors),
        states=TokenPositions(tensors["states"], tensors["own_states"] if sequence else None, len(targets)),
        ends=TokenPositions(tensors["ends"], tensors["own_ends"] if sequence else None, len(chosen)),
        targets=tensors["targets"],
        cells=tensors["cells"],
        mask=tensors["mask"],
        rollout_logprobs=tensors["rollout_logprobs"],
        columns=Columns(**{name: tensor for name, tensor in tensors.items() if name not in arrays}),
        rows=chosen,
        is_dummy=is_dummy,
        sequence=sequence,
    )


@dataclass(frozen=True)
class _Layout:
    """Token layout of a micro-batch, and this rank's part of it."""

    token_ids: np.ndarray  # int64 [b, T] or [1, T], complete
    position_ids: np.ndarray  # int64 [T]
    is_real: np.ndarray  # bool, shape of token_ids
    flat: np.ndarray  # int64 [sum T of the rows]: flat position of each token of the rows
    lengths: np.ndarray  # int64 [s], of segments; packed: one more if T was padded
    prefixes: np.ndarray | None  # int64 [s], index of each segment's prefix, if rows share prefixes
    is_padded: bool
    sequence: SequenceGroup | None

    @property
    def part(self) -> slice:
        width = self.token_ids.shape[1]
        return self.sequence.part(width) if self.sequence else slice(0, width)

    def place(self, values: np.ndarray) -> np.ndarray:
        """Arrange per-token values like token_ids, zero on padding. [sum T, ..] -> [b, T, ..]"""
        placed = np.zeros((self.token_ids.size, *values.shape[1:]), dtype=values.dtype)
        placed[self.flat] = values
        return placed.reshape(*self.token_ids.shape, *values.shape[1:])

    def find_tokens(self, token_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flat positions of those tokens (indices into the rows) that this rank has, and which of them it has."""
        flat = self.flat[token_index]
        if self.sequence is None:
            return flat, np.arange(len(flat))
        return local_positions(flat, self.token_ids.shape[1], self.sequence.rank, self.sequence.size)

    def keys(self) -> dict[str, np.ndarray]:
        """Arrays of SegmentKeys; empty if rows share no prefixes."""
        if self.prefixes is None:
            return {}
        starts, before = segment_offsets(self.lengths)[:-1], self._prefix_lengths(self.prefixes)
        ranges = np.stack([starts[self.prefixes], starts], axis=1).ravel()
        sizes = np.stack([before, self.lengths], axis=1).ravel()
        return {
            "key_index": np.repeat(ranges, sizes) + _counting(sizes),
            "key_cu_seqlens": segment_offsets(before + self.lengths).astype(np.int32),
        }

    def packing(self, tensors: dict[str, Tensor]) -> Packing:
        """Packing with its tensors on the device."""
        keys = None
        if self.prefixes is not None:
            key_lengths = (self._prefix_lengths(self.prefixes) + self.lengths).tolist()
            keys = SegmentKeys(self.prefixes.tolist(), key_lengths, tensors["key_cu_seqlens"], tensors["key_index"])
        return Packing(tensors["cu_seqlens"], self.lengths.tolist(), keys)

    def _prefix_lengths(self, prefixes: np.ndarray) -> np.ndarray:
        """int64 [s]"""
        return np.where(prefixes == np.arange(len(prefixes)), 0, self.lengths[prefixes])


def _lay_out(rows: Rows, padded: bool, sequence: SequenceGroup | None) -> _Layout:
    size = sequence.size if sequence else 1
    if rows.prefixes is not None:
        return _lay_out_shared(rows, rows.prefixes, size, sequence)
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


def _lay_out_shared(rows: Rows, prefixes: Prefixes, size: int, sequence: SequenceGroup | None) -> _Layout:
    """Prefixes, then row remainders. The width is padded to a multiple of `size`."""
    _, first, family = np.unique(prefixes.ids, return_index=True, return_inverse=True)
    shared, own = prefixes.lengths[first], rows.lengths - prefixes.lengths
    lengths = np.concatenate([shared, own])
    needed = int(lengths.sum())
    width = -(-needed // size) * size
    starts = segment_offsets(lengths)[:-1]
    within = _counting(rows.lengths)  # position of each token in its row
    before = np.repeat(prefixes.lengths, rows.lengths)
    remainder = np.repeat(starts[len(first) :], rows.lengths) + within - before
    flat = np.where(within < before, np.repeat(starts[family], rows.lengths) + within, remainder)
    token_ids, position_ids = np.zeros((1, width), dtype=np.int64), np.zeros(width, dtype=np.int64)
    token_ids[0, flat], position_ids[flat] = rows.token_ids, within
    segments = np.concatenate([np.arange(len(first)), family])
    if width > needed:
        lengths, segments = np.append(lengths, width - needed), np.append(segments, len(segments))
    is_real = np.arange(width)[None] < needed
    return _Layout(token_ids, position_ids, is_real, flat, lengths, segments, False, sequence)


def _routed_experts(rows: Rows, chosen: Rows) -> np.ndarray:
    """Experts of the chosen rows, zeros for the dummy; int32 instead of uint16, which torch hardly supports."""
    assert rows.routed_experts is not None
    experts = chosen.routed_experts
    if experts is None:
        experts = np.zeros((2, *rows.routed_experts.shape[1:]), dtype=rows.routed_experts.dtype)
    return experts.astype(np.int32) if experts.dtype == np.uint16 else experts


def _present(columns: Columns[np.ndarray]) -> dict[str, np.ndarray]:
    named = {one.name: getattr(columns, one.name) for one in fields(columns)}
    return {name: column for name, column in named.items() if column is not None}


def _columns_to_copy(columns: Columns[np.ndarray]) -> dict[str, np.ndarray]:
    """Columns as float32 (float64 stays); trajectory ids stay integers and are left out if no rows share one."""
    named = _present(columns)
    ids = named.pop("trajectory_ids", np.zeros(0))
    arrays = {name: column.astype(np.promote_types(column.dtype, np.float32)) for name, column in named.items()}
    return arrays | ({"trajectory_ids": ids} if len(np.unique(ids)) < len(ids) else {})


def _zero_columns(columns: Columns[np.ndarray]) -> Columns[np.ndarray]:
    """A zero in each column that is present."""
    return Columns(**{name: np.zeros(1, column.dtype) for name, column in _present(columns).items()})


def copy_to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays to `device` in one transfer; the tensors are views of one buffer.

    From pinned memory to a GPU, asynchronously: torch keeps the host buffer until the copy is done.
    """
    starts, total = {}, 0
    for name, array in arrays.items():
        starts[name] = total
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host.numpy()[starts[name] : starts[name] + array.nbytes] = raw
    buffer = host.to(device, non_blocking=True)
    tensors = {}
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors[name] = buffer[starts[name] : starts[name] + array.nbytes].view(dtype).view(array.shape)
    return tensors


def make_rows(texts: Sequence[np.ndarray], response_starts: Sequence[int], prefixes: Prefixes | None = None) -> Rows:
    """Build rows in which all response tokens are action tokens, for probes and self-checks."""
    lengths, starts = np.array([len(text) for text in texts]), np.array(response_starts)
    count = int((lengths - starts).sum())
    return Rows(
        token_ids=np.concatenate(texts),
        lengths=lengths,
        response_starts=starts,
        action_mask=np.ones(count, dtype=np.uint8),
        rollout_logprobs=np.zeros(count, dtype=np.float32),
        prefixes=prefixes,
    )


def _counting(lengths: np.ndarray) -> np.ndarray:
    """0, 1, .. n_i - 1 for each length n_i, end to end."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


_DUMMY = replace(make_rows([np.zeros(2, dtype=np.int64)], [1]), action_mask=np.zeros(1, dtype=np.uint8))
