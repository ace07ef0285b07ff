"""Micro-batch: the rows of one forward pass as tensors, in one of three layouts.

padded  [b, T]: each row starts at column 0, zeros on the right. Causal attention needs no mask for right padding.
packed  [1, sum T]: rows end to end; `cu_seqlens` has the row boundaries.
shared  [1, sum T]: packed, first each shared prefix once, then the remainder of each row, which also attends to its
        prefix (data/shared_prompts.py). With padded attention, too, rows that share prefixes have this layout.

With sequence parallelism (models/ulysses.py) each rank has its part of T, padded to a multiple of the group size;
columns, mask and matrices are complete on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from alphaapollo.data.batch import Columns, Rows, compute_offsets
from alphaapollo.data.shared_prompts import SharedPrefixes
from alphaapollo.models.ulysses import LocalTokens, SequenceGroup, find_local_positions
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass(frozen=True)
class SegmentKeys:
    """Attention keys of s segments. A segment attends to its prefix, which is another segment, and to itself."""

    prefixes: list[int]  # [s]: index of each segment's prefix, or of the segment itself if it has no prefix
    lengths: list[int]  # [s]: number of tokens of prefix and segment
    cu_seqlens: Tensor  # int32 [s + 1]: cumulative lengths
    index: Tensor  # int64 [sum lengths]: flat positions of the keys, segment after segment


@dataclass(frozen=True, eq=False)
class Packing:
    """Segments of a packed micro-batch: rows, or shared prefixes and row remainders. Compared by identity."""

    cu_seqlens: Tensor  # int32 [s + 1]
    lengths: list[int]  # [s]
    keys: SegmentKeys | None = None  # None: a segment attends to itself only


@dataclass(frozen=True)
class MicroBatch:
    """b rows with n response tokens in all. A flat column [n] has the responses end to end.

    A micro-batch without rows gets a dummy row with one prompt token and one response token. With the dummy its rank
    takes part in the collectives of forward and backward. The mask and weights of the dummy are zero.
    """

    token_ids: Tensor  # int64 [b, T] or [1, sum T], this rank's part of T; a shared prefix counts once
    position_ids: Tensor  # int64 [1, T] or [1, sum T], this rank's part
    is_real: Tensor  # bool, shape of token_ids: false for padding and the dummy
    routed_experts: Tensor | None  # integers, token_ids.shape + [L, k]: see data.batch.Rows
    packing: Packing | None  # segments, complete on every rank; None: padded
    states: LocalTokens  # the n tokens whose states predict the response tokens
    ends: LocalTokens  # the last tokens of the b rows
    targets: Tensor  # int64 [m]: response tokens that this rank's states predict
    cells: Tensor  # int64 [n]: cell of each response token in the flattened response-aligned matrix [b, L]
    mask: Tensor  # float32 [n]: 1 on action tokens
    rollout_logprobs: Tensor  # float32 [n]: log-probs of the engine
    columns: Columns[Tensor]  # columns of the rows; trajectory_ids only if rows share a trajectory
    rows: Rows
    is_dummy: bool
    sequence: SequenceGroup | None

    def to_matrix(self, flat: Tensor) -> Tensor:
        """Scatter a flat column [n] into a response-aligned matrix [b, L], zero beyond each response."""
        shape = len(self.rows), int(self.rows.response_lengths.max())
        return flat.new_zeros(shape[0] * shape[1]).index_copy(0, self.cells, flat).view(shape)

    def drop_dummy(self, flat: Tensor) -> Tensor:
        """Return a flat column [n] without the entries of the dummy row."""
        return flat[: 0 if self.is_dummy else None]


@dataclass(frozen=True)
class MicroBatchBuilder:
    """Builder of one model's micro-batches, with their layout and device."""

    padded: bool
    device: torch.device
    sequence: SequenceGroup | None = None  # ranks that share every micro-batch

    def build(self, rows: Rows, positions: Sequence[int], columns: Columns[np.ndarray] | None = None) -> MicroBatch:
        """Build the micro-batch of the rows at `positions`, or of the dummy row if there are none.

        `columns` has the columns of all rows. Copies to a GPU are asynchronous.
        """
        HEARTBEAT.tick()
        is_dummy = not len(positions)
        chosen = _DUMMY if is_dummy else rows.select(positions)
        layout = _lay_out_rows(chosen, self.padded, self.sequence.size if self.sequence else 1)
        width = layout.token_ids.shape[1]
        part = self.sequence.get_token_range(width) if self.sequence else slice(None)
        responses = chosen.response_lengths
        starts = chosen.token_offsets[:-1] + chosen.response_starts
        token_index = np.repeat(starts, responses) + _concatenate_ranges(responses)
        states = self._find_tokens(layout, token_index - 1)
        targets = self._copy(chosen.token_ids[token_index])
        cells = np.repeat(np.arange(len(chosen)) * responses.max(), responses) + _concatenate_ranges(responses)
        experts = None if rows.routed_experts is None else _lay_out_experts(rows.routed_experts, chosen, layout)
        return MicroBatch(
            token_ids=self._copy(layout.token_ids[:, part]),
            position_ids=self._copy(layout.position_ids[None, part]),
            is_real=self._copy(layout.is_real[:, part] & (not is_dummy)),
            routed_experts=None if experts is None else self._copy(experts[:, part]),
            packing=self._make_packing(layout),
            states=states,
            ends=self._find_tokens(layout, chosen.token_offsets[1:] - 1),
            targets=targets if states.indices is None else targets[states.indices],
            cells=self._copy(cells),
            mask=self._copy(chosen.action_mask.astype(np.float32)),
            rollout_logprobs=self._copy(chosen.rollout_logprobs.astype(np.float32)),
            columns=self._copy_columns(columns or Columns(), rows, positions),
            rows=chosen,
            is_dummy=is_dummy,
            sequence=self.sequence,
        )

    def _copy(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # torch keeps it until the copy is complete
        return tensor.to(self.device, non_blocking=True)

    def _find_tokens(self, layout: _Layout, token_index: np.ndarray) -> LocalTokens:
        """Find the flat positions of the tokens with the indices `token_index` in the concatenated rows."""
        flat = layout.flat[token_index]
        if self.sequence is None:
            return LocalTokens(self._copy(flat), None, len(flat))
        local, indices = find_local_positions(flat, layout.token_ids.shape[1], self.sequence.rank, self.sequence.size)
        return LocalTokens(self._copy(local), self._copy(indices), len(flat))

    def _make_packing(self, layout: _Layout) -> Packing | None:
        lengths, prefixes, keys = layout.lengths, layout.prefixes, None
        if lengths is None:
            return None
        offsets = compute_offsets(lengths)
        if prefixes is not None:
            before = np.where(prefixes == np.arange(len(prefixes)), 0, lengths[prefixes])
            starts = np.stack([offsets[prefixes], offsets[:-1]], axis=1).ravel()
            sizes = np.stack([before, lengths], axis=1).ravel()
            keys = SegmentKeys(
                prefixes=prefixes.tolist(),
                lengths=(before + lengths).tolist(),
                cu_seqlens=self._copy(compute_offsets(before + lengths).astype(np.int32)),
                index=self._copy(np.repeat(starts, sizes) + _concatenate_ranges(sizes)),
            )
        return Packing(self._copy(offsets.astype(np.int32)), lengths.tolist(), keys)

    def _copy_columns(self, columns: Columns[np.ndarray], rows: Rows, positions: Sequence[int]) -> Columns[Tensor]:
        """Copy the rows' part of `columns` as float32 or float64, zeros for the dummy. Trajectory ids are integers and
        left out if no rows share a trajectory."""
        selected, copied = columns.select(rows, positions), {}
        for name in (field.name for field in fields(selected)):
            column = getattr(selected, name)
            if column is None or (name == "trajectory_ids" and len(np.unique(column)) == len(column)):
                continue
            if name != "trajectory_ids":
                column = column.astype(np.promote_types(column.dtype, np.float32))
            copied[name] = self._copy(column if len(positions) else np.zeros(1, column.dtype))
        return Columns(**copied)


@dataclass(frozen=True)
class _Layout:
    """Token layout of a micro-batch, before it is split over a sequence group."""

    token_ids: np.ndarray  # int64 [b, T] or [1, T]
    position_ids: np.ndarray  # int64 [T]
    is_real: np.ndarray  # bool, shape of token_ids
    flat: np.ndarray  # int64 [sum T of the rows]: flat position of each token of the rows
    lengths: np.ndarray | None = None  # int64 [s], of the segments, and of T's padding if any; None: padded rows
    prefixes: np.ndarray | None = None  # int64 [s], index of each segment's prefix, if rows share prefixes


def _lay_out_rows(rows: Rows, padded: bool, multiple: int) -> _Layout:
    """Lay out rows, padded or packed, with T padded to a multiple of `multiple`."""
    if padded and rows.prefixes is None:
        width = -(-int(rows.lengths.max()) // multiple) * multiple
        is_real = np.arange(width) < rows.lengths[:, None]
        token_ids = np.zeros(is_real.shape, dtype=np.int64)
        token_ids[is_real] = rows.token_ids
        return _Layout(token_ids, np.arange(width), is_real, np.flatnonzero(is_real))
    lengths, segments, flat = rows.lengths, None, np.arange(len(rows.token_ids))
    if rows.prefixes is not None:
        lengths, segments, flat = _share_prefixes(rows, rows.prefixes)
    needed = int(lengths.sum())
    width = -(-needed // multiple) * multiple  # rounded up
    token_ids, position_ids = np.zeros((1, width), dtype=np.int64), np.zeros(width, dtype=np.int64)
    token_ids[0, flat], position_ids[flat] = rows.token_ids, _concatenate_ranges(rows.lengths)
    if width > needed:
        lengths = np.append(lengths, width - needed)
        segments = None if segments is None else np.append(segments, len(segments))
    return _Layout(token_ids, position_ids, np.arange(width)[None] < needed, flat, lengths, segments)


def _share_prefixes(rows: Rows, prefixes: SharedPrefixes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the segments' lengths and prefixes, and the flat position of each token of the rows (see _Layout)."""
    _, first, family = np.unique(prefixes.prefix_ids, return_index=True, return_inverse=True)
    lengths = np.concatenate([prefixes.lengths[first], rows.lengths - prefixes.lengths])
    starts = compute_offsets(lengths)[:-1]
    within = _concatenate_ranges(rows.lengths)  # position of each token in its row
    before = np.repeat(prefixes.lengths, rows.lengths)
    remainder = np.repeat(starts[len(first) :], rows.lengths) + within - before
    flat = np.where(within < before, np.repeat(starts[family], rows.lengths) + within, remainder)
    return lengths, np.concatenate([np.arange(len(first)), family]), flat


def _lay_out_experts(routed: np.ndarray, chosen: Rows, layout: _Layout) -> np.ndarray:
    """Arrange the engine's experts like token_ids, with zeros for padding and the dummy. uint16 becomes int32, because
    few torch operations support uint16."""
    dtype = np.int32 if routed.dtype == np.uint16 else routed.dtype
    experts = np.zeros((layout.token_ids.size, *routed.shape[1:]), dtype)
    if chosen.routed_experts is not None:
        experts[layout.flat] = chosen.routed_experts
    return experts.reshape(*layout.token_ids.shape, *routed.shape[1:])


def make_rows(
    texts: Sequence[np.ndarray], response_starts: Sequence[int], prefixes: SharedPrefixes | None = None
) -> Rows:
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


def _concatenate_ranges(lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges 0, 1, ..., n_i - 1 of all lengths n_i."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


_DUMMY = replace(make_rows([np.zeros(2, dtype=np.int64)], [1]), action_mask=np.zeros(1, dtype=np.uint8))
