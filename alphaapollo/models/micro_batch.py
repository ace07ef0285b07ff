"""Micro-batch: the rows (token sequences) of one forward pass as tensors, in one of three layouts.

padded  [b, T]: each row starts at column 0, zeros on the right. Causal attention needs no mask for right padding.
packed  [1, sum T]: rows end to end; `cu_seqlens` has the row boundaries.
shared  [1, sum T]: packed, first each shared prompt once, then the rest of each row, which also attends to its prompt
        (batching/shared_prompts.py). Rows that share prompts always have this layout.

With sequence parallelism (ulysses.py) T is padded to a multiple of the group size, and each rank of a group has its
part of the T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from alphaapollo.batching.batch import INTEGERS, TARGETS, Columns, Rows, compute_offsets
from alphaapollo.batching.shared_prompts import SharedPrompts
from alphaapollo.models.image_batch import ImageBatch, compute_mrope_positions, make_image_batch
from alphaapollo.models.kept_logits import KeptLogits
from alphaapollo.models.ulysses import SequenceGroup, TokenSelection
from alphaapollo.types import ImageInput, Row
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens


@dataclass(frozen=True)
class SegmentAttentionKeys:
    """Attention keys of the s segments of a packed micro-batch with shared prompts. A segment is a prompt, which
    attends to itself, or the rest of a row (token sequence), which also attends to the row's prompt."""

    prefix_segments: list[int]  # [s]: index of the segment of the row's prompt; a prompt has its own index
    lengths: list[int]  # [s]: number of tokens that the segment attends to
    cu_seqlens: Tensor  # int32 [s + 1]: cumulative lengths
    positions: Tensor  # int64 [sum lengths]: positions of these tokens, for one segment after the other


@dataclass(frozen=True, eq=False)
class Packing:
    """Boundaries of the s segments of a packed micro-batch. A segment is a row (token sequence) or, if rows share
    prompts, a prompt or the rest of a row. Instances are compared by identity."""

    cu_seqlens: Tensor  # int32 [s + 1]
    lengths: list[int]  # [s]
    keys: SegmentAttentionKeys | None = None  # None: a segment attends to itself only


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of b rows (token sequences). Tensors of shape [n] have one value per response token, row after row.
    Without rows, a dummy row of two tokens with zero mask and weights takes part in the collectives of the passes."""

    token_ids: Tensor  # int64 [b, T] or [1, sum T], this rank's part of T; a shared prompt counts once
    position_ids: Tensor  # int64 [1, T] or [1, sum T], this rank's part; with M-RoPE [3, b, T] or [3, 1, sum T]
    is_real_token: Tensor  # bool, shape of token_ids: false for padding and the dummy
    token_columns: dict[str, Tensor]  # token_ids.shape + [...]: Rows.columns with one entry per token
    images: ImageBatch | None  # images of this rank's tokens
    packing: Packing | None  # segments, complete on every rank; None: padded
    predicting_tokens: TokenSelection  # the n tokens whose hidden states predict the response tokens
    last_tokens: TokenSelection  # the last tokens of the b rows
    targets: Tensor  # int64 [m]: response tokens that this rank's hidden states predict
    kept: KeptLogits | None  # of the same m tokens: the tokens from which they were sampled; None: all
    matrix_indices: Tensor  # int64 [n]: index of each response token in a flattened matrix [b, L], one response per row
    mask: Tensor  # float32 [n]: 1 on tokens that the policy sampled
    rollout_logprobs: Tensor  # float32 [n]: log-probs of the engine
    columns: Columns[Tensor]  # inputs of the loss; trajectory_ids is None if no rows share a trajectory
    rows: Rows
    is_dummy: bool
    sequence: SequenceGroup | None

    def to_matrix(self, values: Tensor) -> Tensor:
        """Scatter values of the n response tokens into a matrix [b, L], one response per row and zeros after it."""
        num_rows, longest = len(self.rows), int(self.rows.response_lengths.max())
        flat = values.new_zeros(num_rows * longest).index_copy(0, self.matrix_indices, values)
        return flat.view(num_rows, longest)

    def drop_dummy_row(self, values: Tensor) -> Tensor:
        """Return `values` (one per row or response token) unchanged, or an empty tensor if the only row is a dummy."""
        return values[:0] if self.is_dummy else values


@dataclass(frozen=True)
class MicroBatchBuilder:
    """Builds a model's micro-batches, padded or packed, on its device."""

    padded: bool
    device: torch.device
    sequence: SequenceGroup | None = None  # ranks that share every micro-batch

    def build(self, rows: Rows, row_indices: Sequence[int], columns: Columns[np.ndarray] | None = None) -> MicroBatch:
        """Build the micro-batch of the rows with these indices, or of a dummy row if there are none. `columns`: inputs
        of the loss for all rows. Copies to a GPU are asynchronous."""
        HEARTBEAT.tick()
        is_dummy = not len(row_indices)
        chosen = _DUMMY if is_dummy else rows.select(row_indices)
        size, rank = (self.sequence.size, self.sequence.rank) if self.sequence else (1, 0)
        layout = _lay_out_rows(chosen, self.padded, size)
        width = layout.token_ids.shape[1]
        part = slice(rank * (width // size), (rank + 1) * (width // size))
        responses = chosen.response_lengths
        starts = chosen.token_offsets[:-1] + chosen.response_starts
        token_index = np.repeat(starts, responses) + _concatenate_ranges(responses)
        predictors = self._select_tokens(layout, token_index - 1)
        target_ids = chosen.columns.get(TARGETS, chosen.token_ids)
        targets = self.to_device(target_ids[token_index].astype(np.int64))
        matrix_indices = np.repeat(np.arange(len(chosen)) * responses.max(), responses) + _concatenate_ranges(responses)
        find_local = partial(self._find_local_tokens, width=width)
        token_columns = {name: column for name, column in rows.columns.items() if isinstance(column, np.ndarray)}
        return MicroBatch(
            token_ids=self.to_device(layout.token_ids[:, part]),
            position_ids=self.to_device(_compute_position_ids(chosen, layout)[..., part]),
            is_real_token=self.to_device(layout.is_real_token[:, part] & (not is_dummy)),
            token_columns={
                name: self.to_device(_lay_out_column(column, chosen.columns.get(name), layout)[:, part])
                for name, column in token_columns.items()
            },
            images=make_image_batch(chosen, layout.flat_indices, find_local, self.to_device),
            packing=self._make_packing(layout),
            predicting_tokens=predictors,
            last_tokens=self._select_tokens(layout, chosen.token_offsets[1:] - 1),
            targets=targets if predictors.selection_indices is None else targets[predictors.selection_indices],
            kept=_find_kept_tokens(chosen, token_index - 1, predictors),
            matrix_indices=self.to_device(matrix_indices),
            mask=self.to_device(chosen.action_mask.astype(np.float32)),
            rollout_logprobs=self.to_device(chosen.rollout_logprobs.astype(np.float32)),
            columns=self._copy_columns(columns or Columns(), rows, row_indices),
            rows=chosen,
            is_dummy=is_dummy,
            sequence=self.sequence,
        )

    def to_device(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device, without waiting for the copy."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # torch keeps this memory until the copy is complete
        return tensor.to(self.device, non_blocking=True)

    def _select_tokens(self, layout: _TokenLayout, token_index: np.ndarray) -> TokenSelection:
        """Select the tokens that have the indices `token_index` in the concatenated rows."""
        positions = layout.flat_indices[token_index]
        local, indices = self._find_local_tokens(positions, layout.token_ids.shape[1])
        return TokenSelection(self.to_device(local), self.to_device(indices) if self.sequence else None, len(positions))

    def _find_local_tokens(self, positions: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Find this rank's tokens among positions in a flattened array [b, width] that the ranks split by columns.
        Returns their positions in the rank's flattened part, and their indices in `positions`."""
        if self.sequence is None:
            return positions, np.arange(len(positions))
        rows, columns = np.divmod(positions, width)
        part = width // self.sequence.size
        indices = np.flatnonzero(columns // part == self.sequence.rank)
        return rows[indices] * part + columns[indices] % part, indices

    def _make_packing(self, layout: _TokenLayout) -> Packing | None:
        lengths, prefixes, keys = layout.segment_lengths, layout.prefix_segments, None
        if lengths is None:
            return None
        offsets = compute_offsets(lengths)
        if prefixes is not None:
            prefix_lengths = np.where(prefixes == np.arange(len(prefixes)), 0, lengths[prefixes])
            starts = np.stack([offsets[prefixes], offsets[:-1]], axis=1).ravel()
            sizes = np.stack([prefix_lengths, lengths], axis=1).ravel()
            keys = SegmentAttentionKeys(
                prefix_segments=prefixes.tolist(),
                lengths=(prefix_lengths + lengths).tolist(),
                cu_seqlens=self.to_device(compute_offsets(prefix_lengths + lengths).astype(np.int32)),
                positions=self.to_device(np.repeat(starts, sizes) + _concatenate_ranges(sizes)),
            )
        return Packing(self.to_device(offsets.astype(np.int32)), lengths.tolist(), keys)

    def _copy_columns(self, columns: Columns[np.ndarray], rows: Rows, row_indices: Sequence[int]) -> Columns[Tensor]:
        """Copy the loss inputs of the rows at `row_indices` to the device, as float32 or float64. Without indices, each
        input is a zero for the dummy row. Ids remain integers. Trajectory ids that are all distinct are omitted."""
        selected, copied = columns.select(rows, row_indices), {}
        for name, column in vars(selected).items():
            if column is None or (name == "trajectory_ids" and len(np.unique(column)) == len(column)):
                continue
            if name not in INTEGERS:
                column = column.astype(np.promote_types(column.dtype, np.float32))
            copied[name] = self.to_device(
                column if len(row_indices) else np.zeros((1, *column.shape[1:]), column.dtype)
            )
        return Columns(**copied)


def _find_kept_tokens(rows: Rows, predictors: np.ndarray, local: TokenSelection) -> KeptLogits | None:
    """Return the tokens that the sampler kept at this rank's `local` part of the positions `predictors`, which are
    indices in the concatenated rows."""
    codes = rows.columns.get(KEPT_TOKENS)
    if codes is None:
        return None
    pairs = zip(codes, rows.lengths, strict=True)
    kept = KeptTokens.concatenate(
        [KeptTokens.decode(code) if code else KeptTokens.of_sets([()] * int(length)) for code, length in pairs]
    )
    if local.selection_indices is not None:
        predictors = predictors[local.selection_indices.cpu().numpy()]
    starts, sizes = (np.cumsum(kept.sizes) - kept.sizes)[predictors], kept.sizes[predictors]
    ids = kept.ids[np.repeat(starts, sizes) + _concatenate_ranges(sizes)]
    return KeptLogits(torch.from_numpy(compute_offsets(sizes)), torch.from_numpy(ids))


@dataclass(frozen=True)
class _TokenLayout:
    """Positions of all tokens of a micro-batch in a padded or packed array, before sequence parallelism splits it."""

    token_ids: np.ndarray  # int64 [b, T] or [1, T]
    position_ids: np.ndarray  # int64 [T]
    is_real_token: np.ndarray  # bool, shape of token_ids
    flat_indices: np.ndarray  # int64: index of each token of the concatenated rows in the flattened token_ids
    segment_lengths: np.ndarray | None = None  # int64 [s], with a last segment for padding if any; None: padded rows
    prefix_segments: np.ndarray | None = None  # int64 [s], see SegmentAttentionKeys; None: rows share no prompts


def _lay_out_rows(rows: Rows, padded: bool, width_multiple: int) -> _TokenLayout:
    """Place rows in a padded [b, T] or packed [1, T] array, with T rounded up to a multiple of `width_multiple`."""
    if padded and rows.shared_prompts is None:
        width = -(-int(rows.lengths.max()) // width_multiple) * width_multiple
        is_real_token = np.arange(width) < rows.lengths[:, None]
        token_ids = np.zeros(is_real_token.shape, dtype=np.int64)
        token_ids[is_real_token] = rows.token_ids
        return _TokenLayout(token_ids, np.arange(width), is_real_token, np.flatnonzero(is_real_token))
    lengths, prefixes, positions = rows.lengths, None, np.arange(len(rows.token_ids))
    if rows.shared_prompts is not None:
        lengths, prefixes, positions = _compute_shared_prompt_layout(rows, rows.shared_prompts)
    needed = int(lengths.sum())
    width = -(-needed // width_multiple) * width_multiple  # rounded up
    token_ids, position_ids = np.zeros((1, width), dtype=np.int64), np.zeros(width, dtype=np.int64)
    token_ids[0, positions], position_ids[positions] = rows.token_ids, _concatenate_ranges(rows.lengths)
    if width > needed:
        lengths = np.append(lengths, width - needed)
        prefixes = None if prefixes is None else np.append(prefixes, len(prefixes))
    return _TokenLayout(token_ids, position_ids, np.arange(width)[None] < needed, positions, lengths, prefixes)


def _compute_shared_prompt_layout(
    rows: Rows, shared_prompts: SharedPrompts
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay out a packed micro-batch: each shared prompt once, then each row without its prompt. Returns the fields
    segment_lengths, prefix_segments and flat_indices of _TokenLayout."""
    _, first_rows, prefix_of_row = np.unique(shared_prompts.prefix_ids, return_index=True, return_inverse=True)
    lengths = np.concatenate([shared_prompts.lengths[first_rows], rows.lengths - shared_prompts.lengths])
    starts = compute_offsets(lengths)[:-1]
    in_row = _concatenate_ranges(rows.lengths)  # position of each token in its row
    prefix_length = np.repeat(shared_prompts.lengths, rows.lengths)
    in_prefix = np.repeat(starts[prefix_of_row], rows.lengths) + in_row
    in_remainder = np.repeat(starts[len(first_rows) :], rows.lengths) + in_row - prefix_length
    positions = np.where(in_row < prefix_length, in_prefix, in_remainder)
    return lengths, np.concatenate([np.arange(len(first_rows)), prefix_of_row]), positions


def _compute_position_ids(rows: Rows, layout: _TokenLayout) -> np.ndarray:
    """Return position ids [1, T], or [3, b, T] if an image needs M-RoPE. Positions of padding are arbitrary."""
    positions = compute_mrope_positions(rows)
    if positions is None:
        return layout.position_ids[None]
    placed = np.zeros((3, layout.token_ids.size), dtype=np.int64)
    placed[:, layout.flat_indices] = positions
    return placed.reshape(3, *layout.token_ids.shape)


def _lay_out_column(column: np.ndarray, selected: object, layout: _TokenLayout) -> np.ndarray:
    """Place the values `selected` of a column where their tokens are, with zeros for padding. None: only zeros, for the
    dummy row. uint16 becomes int32, because few torch operations support uint16."""
    dtype = np.int32 if column.dtype == np.uint16 else column.dtype
    placed = np.zeros((layout.token_ids.size, *column.shape[1:]), dtype)
    if selected is not None:
        placed[layout.flat_indices] = selected
    return placed.reshape(*layout.token_ids.shape, *column.shape[1:])


def make_rows(
    token_ids: Sequence[np.ndarray],
    response_starts: Sequence[int],
    shared_prompts: SharedPrompts | None = None,
    images: Sequence[tuple[ImageInput, ...]] | None = None,
) -> Rows:
    """Build training rows from token ids, for self-checks. Tokens from `response_starts` on are marked as sampled."""
    rows = [
        Row(ids.tolist(), [0] * start + [1] * (len(ids) - start), [0.0] * len(ids), [len(ids) - 1], images=row_images)
        for ids, start, row_images in zip(token_ids, response_starts, images or [()] * len(token_ids), strict=True)
    ]
    return Rows.from_rows(rows, shared_prompts)


def _concatenate_ranges(lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges 0, 1, ..., n_i - 1 of all lengths n_i."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


_DUMMY = replace(make_rows([np.zeros(2, dtype=np.int64)], [1]), action_mask=np.zeros(1, dtype=np.uint8))
