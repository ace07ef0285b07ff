"""Batches of token sequences that the driver sends to the training ranks.

    list[Row] -> BatchLayout = one RankBatch per rank (its Rows, split into mini-batches of micro-batches)

A column is an array with one number per response token of a rank, e.g. log-probs. BatchLayout converts between the
columns of all ranks and one array [n] over the response tokens of all sequences, for the algorithms.

Arrays are flat (sequences are concatenated without padding), and Ray passes them without a copy. The assignment of
sequences to ranks and mini-batches is final after packing.build_batch_layout, so each loss has a fixed denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from alphaapollo.batching.shared_prompts import SharedPrompts
from alphaapollo.types import LONGER_PROMPT, ImageInput, Row

A = TypeVar("A")
Column = np.ndarray | tuple[Any, ...]
PER_ROW = ("loss_weights", "sequence_weights", "value_weights", "divergence_weights", "trajectory_ids")
"""Columns with one value per row."""
TARGETS, WEIGHTS = "targets", "weights"
"""Columns [T] of a row: tokens to predict instead of the row's own tokens, and the weight of each token in the loss."""
INTEGERS = ("trajectory_ids", "top_tokens")  # columns that are not converted to floating point


@dataclass(frozen=True)
class Rows:
    """R token sequences (rows), concatenated without padding.

    The response of a row starts at its first token sampled by the model and includes later observations. In the
    shapes below, "sum T" is the total length of all rows and "sum responses" the total length of their responses.

    Example: the row `[5, 6 | 7, 8]` (prompt | response) has lengths [4], response_starts [2], action_mask [1, 1].
    """

    token_ids: np.ndarray  # int32 [sum T]
    lengths: NDArray[np.int64]  # [R]
    response_starts: NDArray[np.int64]  # [R], always >= 1, because the first token has no log-prob
    action_mask: np.ndarray  # uint8 [sum responses]
    rollout_logprobs: np.ndarray  # float32 [sum responses], from the engine; 0 off the mask
    shared_prompts: SharedPrompts | None = None  # prefixes that rows of a micro-batch share; None: no sharing
    images: tuple[tuple[ImageInput, ...], ...] | None = None  # images of each row; None: no row has an image
    columns: dict[str, Column] = field(default_factory=dict)
    """Row.columns of all rows: an array [sum T, ...] with a value per token, or a tuple [R] with values or None."""

    @classmethod
    def from_rows(cls, rows: Sequence[Row], shared_prompts: SharedPrompts | None = None) -> Rows:
        """Concatenate token sequences. Each needs at least one prompt token and one token sampled by the model."""
        starts = [row.response_start for row in rows]
        assert all(start >= 1 for start in starts), "a row needs at least one prompt token"
        rows_and_starts = list(zip(rows, starts, strict=True))
        column_names = dict.fromkeys(name for row in rows for name in row.columns)  # without repetitions, in order
        return cls(
            token_ids=_concatenate_sequences([row.token_ids for row in rows], np.int32),
            lengths=np.array([len(row.token_ids) for row in rows], dtype=np.int64),
            response_starts=np.array(starts, dtype=np.int64),
            action_mask=_concatenate_sequences([row.action_mask[start:] for row, start in rows_and_starts], np.uint8),
            rollout_logprobs=_concatenate_sequences(
                [row.logprobs[start:] for row, start in rows_and_starts], np.float32
            ),
            shared_prompts=shared_prompts,
            images=tuple(tuple(row.images) for row in rows) if any(row.images for row in rows) else None,
            columns={name: _join_column(name, rows) for name in column_names},
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """Length of each response in tokens, [R]."""
        return self.lengths - self.response_starts

    @cached_property
    def token_offsets(self) -> np.ndarray:
        """Offsets int64 [R + 1]: the tokens of row r are token_ids[offsets[r]:offsets[r + 1]]."""
        return compute_offsets(self.lengths)

    @cached_property
    def response_offsets(self) -> np.ndarray:
        """Offsets int64 [R + 1]: in an array over response tokens, row r has array[offsets[r]:offsets[r + 1]]."""
        return compute_offsets(self.response_lengths)

    def take_responses(self, column: np.ndarray) -> np.ndarray:
        """Return the part of a column [sum T, ...] that belongs to the responses, [sum responses, ...]."""
        spans = zip(self.token_offsets[:-1] + self.response_starts, self.token_offsets[1:], strict=True)
        return np.concatenate([column[:0], *(column[start:end] for start, end in spans)])

    def select(self, row_indices: Sequence[int]) -> Rows:
        """Return the rows with the given indices, in this order, e.g. the rows of a micro-batch."""
        return Rows(
            token_ids=concatenate_segments(self.token_ids, self.token_offsets, row_indices),
            lengths=self.lengths[list(row_indices)],
            response_starts=self.response_starts[list(row_indices)],
            action_mask=concatenate_segments(self.action_mask, self.response_offsets, row_indices),
            rollout_logprobs=concatenate_segments(self.rollout_logprobs, self.response_offsets, row_indices),
            shared_prompts=None if self.shared_prompts is None else self.shared_prompts.select(row_indices),
            images=None if self.images is None else tuple(self.images[index] for index in row_indices),
            columns={
                name: concatenate_segments(column, self.token_offsets, row_indices)
                if isinstance(column, np.ndarray)
                else tuple(column[index] for index in row_indices)
                for name, column in self.columns.items()
            },
        )

    @cached_property
    def has_longer_prompt(self) -> np.ndarray:
        """Whether each row has a second prompt (LONGER_PROMPT), bool [R]."""
        return np.array([bool(prompt) for prompt in self.columns.get(LONGER_PROMPT, [()] * len(self))], dtype=bool)

    @cached_property
    def rows_with_longer_prompts(self) -> Rows:
        """These rows with the second prompt instead of the first, where a row has one. The responses do not change."""
        if LONGER_PROMPT not in self.columns:
            return self
        assert self.images is None and self.shared_prompts is None, "longer prompts have no images and are not shared"
        starts, ends = self.token_offsets[:-1] + self.response_starts, self.token_offsets[1:]
        prompts = [
            np.array(prompt, dtype=np.int32) if prompt else self.token_ids[first:start]
            for prompt, first, start in zip(self.columns[LONGER_PROMPT], self.token_offsets[:-1], starts, strict=True)
        ]
        responses = [self.token_ids[start:end] for start, end in zip(starts, ends, strict=True)]
        response_starts = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        return replace(
            self,
            token_ids=np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair]),
            lengths=response_starts + self.response_lengths,
            response_starts=response_starts,
            columns={},  # columns per token do not fit the longer prompts
        )

    def get_segment_and_prefix_lengths(self, row_indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of the sequences that a forward pass over some rows computes, without padding, and the
        number of prefix tokens that each sequence also attends to (SharedPrompts.get_segment_and_prefix_lengths).
        int64 [sequences] each"""
        lengths = self.lengths[list(row_indices)]
        if self.shared_prompts is None:
            return lengths, np.zeros_like(lengths)
        return self.shared_prompts.select(row_indices).get_segment_and_prefix_lengths(lengths)

    def count_computed_tokens(self, row_indices: Sequence[int], padded: bool) -> int:
        """Count the tokens of a forward pass over some rows, with padding if `padded`. Shared prefixes count once."""
        lengths, _ = self.get_segment_and_prefix_lengths(row_indices)
        is_padded = padded and self.shared_prompts is None
        return len(lengths) * int(lengths.max(initial=0)) if is_padded else int(lengths.sum())


@dataclass(frozen=True)
class Columns(Generic[A]):
    """Numbers per response token, or per row, that a loss needs in addition to the tokens of a rank: numpy arrays, or
    tensors in a micro-batch. None: the algorithm does not need them."""

    advantages: A | None = None  # float32 [sum responses], like the next four columns
    returns: A | None = None
    old_logprobs: A | None = None
    ref_logprobs: A | None = None
    values: A | None = None
    loss_weights: A | None = None  # float32 [R], weight of the token sum of each row in the loss
    sequence_weights: A | None = None  # float32 [R], weight of the row's trajectory in a sequence-level loss
    value_weights: A | None = None  # float32 [R], weight of the token sum of each row in the loss of the critic
    divergence_weights: A | None = None  # float32 [R], like loss_weights, for divergences; None: use loss_weights
    trajectory_ids: A | None = None  # int64 [R], equal for all rows of a trajectory
    selected_tokens: A | None = None  # uint8 [sum responses], tokens selected by PolicyLoss.select_tokens
    token_weights: A | None = None  # float32 [sum responses], factor of each token's weight; None: 1
    target_logprobs: A | None = None  # float32 [sum responses], log-probs of the sampled tokens under the teachers
    top_tokens: A | None = None  # int32 [sum responses, servers, k], most probable tokens of each model behind a server
    top_token_logprobs: A | None = None  # float32 [sum responses, servers, k + 1]; entry k: all other tokens together

    def select(self: Columns[np.ndarray], rows: Rows, row_indices: Sequence[int]) -> Columns[np.ndarray]:
        """Return the columns of the rows at `row_indices`. `rows`: all rows that these columns describe."""
        selected = {}
        for name, column in vars(self).items():
            if column is not None and name in PER_ROW:
                selected[name] = column[list(row_indices)]
            elif column is not None:
                selected[name] = concatenate_segments(column, rows.response_offsets, row_indices)
        return Columns(**selected)


@dataclass(frozen=True)
class MiniBatch:
    """Rows that one rank trains on in one optimizer step. For an empty micro-batch, a rank computes a dummy row with
    weight 0, so that all ranks run the same number of passes."""

    micro_batches: list[list[int]]  # for each micro-batch: indices of its rows in the rank's Rows

    @property
    def row_indices(self) -> list[int]:
        """Indices of all rows of the mini-batch."""
        return [index for micro_batch in self.micro_batches for index in micro_batch]


@dataclass(frozen=True)
class RankBatch:
    """Rows of one training rank and their mini-batches. In fine-tuning, a batch has one mini-batch."""

    rows: Rows
    mini_batches: list[MiniBatch]

    def count_computed_tokens(self, padded: bool) -> int:
        """Count the tokens that this rank's forward passes compute. Padding counts; shared prefixes count once."""
        micros = [micro for mini_batch in self.mini_batches for micro in mini_batch.micro_batches]
        return sum(self.rows.count_computed_tokens(micro, padded) for micro in micros)


@dataclass(frozen=True)
class BatchLayout:
    """The B token sequences of one training iteration, distributed to the ranks. In an array over the n response tokens
    of the batch, those of sequence i are array[response_offsets[i]:response_offsets[i + 1]]."""

    rank_batches: list[RankBatch]
    row_order: list[np.ndarray]  # for each rank, int64: indices of its rows in the batch
    mini_batch_rows: list[list[int]]  # for each mini-batch: indices of its rows, over all ranks

    @cached_property
    def num_rows(self) -> int:
        return sum(len(order) for order in self.row_order)

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens of all rows, including prompts."""
        return sum(int(rank.rows.lengths.sum()) for rank in self.rank_batches)

    def count_computed_tokens(self, padded: bool) -> int:
        """Count the tokens that the forward passes of all ranks compute. Padding counts; shared prefixes count once."""
        return sum(rank.count_computed_tokens(padded) for rank in self.rank_batches)

    @cached_property
    def response_offsets(self) -> np.ndarray:
        """Offsets int64 [B + 1] of the sequences in an array over the n response tokens of the batch."""
        lengths = np.empty(self.num_rows, dtype=np.int64)
        for rank, order in zip(self.rank_batches, self.row_order, strict=True):
            lengths[order] = rank.rows.response_lengths
        return compute_offsets(lengths)

    def join_columns(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Copy values of response tokens, one array per rank, into one array [n] in the order of the batch."""
        values = np.empty(self.response_offsets[-1], dtype=columns[0].dtype)
        for column, spans in zip(columns, self._response_spans, strict=True):
            for batch_start, start, end in spans:
                values[batch_start : batch_start + end - start] = column[start:end]
        return values

    def split_by_rank(self, values: np.ndarray) -> list[np.ndarray]:
        """Copy an array [n, ...] over the response tokens of the batch into an array [sum responses, ...] per rank."""
        assert len(values) == self.response_offsets[-1], (values.shape, self.response_offsets[-1])
        columns = []
        for rank, spans in zip(self.rank_batches, self._response_spans, strict=True):
            column = np.empty((rank.rows.response_offsets[-1], *values.shape[1:]), values.dtype)
            for batch_start, start, end in spans:
                column[start:end] = values[batch_start : batch_start + end - start]
            columns.append(column)
        return columns

    def split_columns(self, columns: Columns[np.ndarray]) -> list[Columns[np.ndarray]]:
        """Split columns over the batch, [n, ...] or [B], into the columns of each rank."""
        parts = {
            name: self.split_row_values(values) if name in PER_ROW else self.split_by_rank(values)
            for name, values in vars(columns).items()
            if values is not None
        }
        return [Columns(**{name: part[rank] for name, part in parts.items()}) for rank in range(len(self.rank_batches))]

    def split_row_values(self, values: np.ndarray) -> list[np.ndarray]:
        """Split an array [B] with one value per token sequence into one array [R] per rank."""
        assert values.shape == (self.num_rows,), values.shape
        return [values[order] for order in self.row_order]

    @cached_property
    def _response_spans(self) -> list[list[tuple[int, int, int]]]:
        """For each rank and each of its rows: (start in an array [n] of the batch, start and end in the rank's array).
        Copying row by row is faster than fancy indexing."""
        spans = []
        for rank, order in zip(self.rank_batches, self.row_order, strict=True):
            offsets = rank.rows.response_offsets.tolist()
            starts = self.response_offsets[order].tolist()
            spans.append(list(zip(starts, offsets[:-1], offsets[1:], strict=True)))
        return spans


@dataclass(frozen=True)
class FinetuningStepResult:
    """Loss sums and metrics of one optimizer step in fine-tuning, equal on all ranks."""

    metric_sums: dict[str, float]  # sums over all ranks and micro-batches, e.g. {"loss": 812.4, "tokens": 960.0}
    metrics: dict[str, float]  # metrics of the optimizer step, e.g. {"grad_norm": 1.3, "lr": 1e-5}


def concatenate_segments(values: np.ndarray, offsets: np.ndarray, segment_indices: Sequence[int]) -> np.ndarray:
    """Concatenate values[offsets[i]:offsets[i + 1]] for each i in `segment_indices`, which may be empty."""
    return np.concatenate([values[:0], *(values[offsets[i] : offsets[i + 1]] for i in segment_indices)])


def compute_offsets(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each of n concatenated sequences and the end of the last: `[2, 3]` -> `[0, 2, 5]`."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _concatenate_sequences(sequences: Sequence[Sequence[int] | Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *sequences], dtype=dtype, casting="unsafe")


def _join_column(name: str, rows: Sequence[Row]) -> Column:
    values: tuple[Any, ...] = tuple(row.columns.get(name) for row in rows)
    shape = next((value.shape[1:] for value in values if isinstance(value, np.ndarray)), None)
    if shape is None:
        return values
    assert all(value is not None for value in values), f"{name} is missing for some rows"
    parts = [
        value if isinstance(value, np.ndarray) else np.broadcast_to(value, (len(row.token_ids), *shape))
        for value, row in zip(values, rows, strict=True)  # a number applies to each token
    ]
    return np.concatenate(parts)
