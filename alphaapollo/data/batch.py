"""Training batches that the driver sends to the ranks.

    list[Row] -> TrainBatch = one RankBatch per rank (its Rows, split into mini-batches of micro-batches)
                 flat columns of the ranks <-> response-aligned matrices [B, L] for the algorithms

All arrays are flat numpy: no padding is sent, and Ray passes them without a copy. The layout is fixed once
built (see packing.build_train_batch), so no later step can change the denominator of a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from alphaapollo.data.shared_prompts import SharedPrefixes
from alphaapollo.types import Row

A = TypeVar("A")
PER_ROW = ("loss_weights", "sequence_weights", "value_weights", "trajectory_ids")  # columns with one value per row


@dataclass(frozen=True)
class Rows:
    """R token sequences, stored as flat concatenated arrays.

    A row's *response* is its tokens from the first action token to the end (action tokens and the observations
    between them); its length is `lengths - response_starts`. "sum T" and "sum responses" are totals over rows.

    Example: the row `[5, 6 | 7, 8]` (prompt | response) has lengths [4], response_starts [2], action_mask [1, 1].
    """

    token_ids: np.ndarray  # int64 [sum T]
    lengths: np.ndarray  # int64 [R]
    response_starts: np.ndarray  # int64 [R], always >= 1, because the first token has no log-prob
    action_mask: np.ndarray  # uint8 [sum responses]
    rollout_logprobs: np.ndarray  # float32 [sum responses], from the engine; 0 off the mask
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [sum T, layers, k], chosen by the engine's router
    prefixes: SharedPrefixes | None = None  # prefixes that rows of a micro-batch share; None: no sharing

    @classmethod
    def from_rows(cls, rows: Sequence[Row], prefixes: SharedPrefixes | None = None) -> Rows:
        """Concatenate rows. Each row needs at least one prompt token and one action token."""
        starts = [row.response_start for row in rows]
        assert all(start >= 1 for start in starts), "a row needs at least one prompt token"
        responses = list(zip(rows, starts, strict=True))
        return cls(
            token_ids=_concatenate([row.token_ids for row in rows], np.int64),
            lengths=np.array([len(row.token_ids) for row in rows], dtype=np.int64),
            response_starts=np.array(starts, dtype=np.int64),
            action_mask=_concatenate([row.action_mask[start:] for row, start in responses], np.uint8),
            rollout_logprobs=_concatenate([row.logprobs[start:] for row, start in responses], np.float32),
            routed_experts=_concatenate_experts(rows),
            prefixes=prefixes,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> np.ndarray:
        """Length of each response in tokens, int64 [R]."""
        return self.lengths - self.response_starts

    @cached_property
    def token_offsets(self) -> np.ndarray:
        """Offsets int64 [R + 1]: the tokens of row r are token_ids[offsets[r]:offsets[r + 1]]."""
        return compute_offsets(self.lengths)

    @cached_property
    def response_offsets(self) -> np.ndarray:
        """Offsets int64 [R + 1]: the response of row r is column[offsets[r]:offsets[r + 1]] in a response column."""
        return compute_offsets(self.response_lengths)

    def select(self, positions: Sequence[int]) -> Rows:
        """Return the rows at `positions`, in that order, e.g. one micro-batch."""
        return Rows(
            token_ids=concatenate_segments(self.token_ids, self.token_offsets, positions),
            lengths=self.lengths[list(positions)],
            response_starts=self.response_starts[list(positions)],
            action_mask=concatenate_segments(self.action_mask, self.response_offsets, positions),
            rollout_logprobs=concatenate_segments(self.rollout_logprobs, self.response_offsets, positions),
            routed_experts=None
            if self.routed_experts is None
            else concatenate_segments(self.routed_experts, self.token_offsets, positions),
            prefixes=None if self.prefixes is None else self.prefixes.select(positions),
        )

    def segments(self, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the segments that a forward pass over the rows at `positions` computes, without padding.

        A segment is a complete row, or a shared prefix, or the remainder of a row. Returns the length of each segment
        and the number of prefix tokens that the segment also attends to, int64 [segments] each.
        """
        lengths = self.lengths[list(positions)]
        if self.prefixes is None:
            return lengths, np.zeros_like(lengths)
        return self.prefixes.select(positions).segments(lengths)

    def count_computed_tokens(self, positions: Sequence[int], padded: bool) -> int:
        """Count the tokens that a forward pass over the rows at `positions` computes. Shared prefixes count once.

        padded: rows without prefixes are padded to the longest row, and padding counts.
        """
        lengths = self.segments(positions)[0]
        is_padded = padded and self.prefixes is None
        return len(lengths) * int(lengths.max(initial=0)) if is_padded else int(lengths.sum())


@dataclass(frozen=True)
class Columns(Generic[A]):
    """Columns of values for the rows of a rank; None if the algorithm does not need them.

    Columns are sent after the layout is fixed. They are numpy arrays, or tensors on the device in a micro-batch.
    """

    advantages: A | None = None  # float32 [sum responses], like the next four columns
    returns: A | None = None
    old_logprobs: A | None = None
    ref_logprobs: A | None = None
    values: A | None = None
    loss_weights: A | None = None  # float32 [R], weight of the token sum of each row in the loss
    sequence_weights: A | None = None  # float32 [R], weight of the row's trajectory in a sequence-level loss
    value_weights: A | None = None  # float32 [R], weight of the token sum of each row in the loss of the critic
    trajectory_ids: A | None = None  # int64 [R], equal for all rows of a trajectory
    chosen: A | None = None  # uint8 [sum responses], tokens selected by PolicyLoss.choose

    def select(self: Columns[np.ndarray], rows: Rows, positions: Sequence[int]) -> Columns[np.ndarray]:
        """Return the columns of the rows at `positions`. `rows`: all rows that the columns belong to."""
        selected = {}
        for name, column in vars(self).items():
            if column is not None and name in PER_ROW:
                selected[name] = column[list(positions)]
            elif column is not None:
                selected[name] = concatenate_segments(column, rows.response_offsets, positions)
        return Columns(**selected)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step of one rank. Each micro-batch lists positions in the rank's Rows.

    All ranks run the same number of forward and backward passes, so an empty micro-batch computes a dummy row of
    weight 0.
    """

    micro_batches: list[list[int]]

    @property
    def positions(self) -> list[int]:
        """Positions of all rows of the mini-batch."""
        return [position for micro_batch in self.micro_batches for position in micro_batch]


@dataclass(frozen=True)
class RankBatch:
    """Rows of one training rank and their mini-batches.

    Ranks of one sequence-parallel group have equal RankBatches. In fine-tuning, a batch has one mini-batch.
    """

    rows: Rows
    mini_batches: list[MiniBatch]

    def count_computed_tokens(self, padded: bool) -> int:
        """Count the tokens that a forward pass over all rows computes. Padding counts; shared prefixes count once."""
        micros = [micro for mini_batch in self.mini_batches for micro in mini_batch.micro_batches]
        return sum(self.rows.count_computed_tokens(micro, padded) for micro in micros)


@dataclass(frozen=True)
class TrainBatch:
    """The B rows of one iteration, distributed to the ranks.

    Matrices [B, L] are response-aligned (column 0 is a row's first action token), in the order of the rows that the
    batch was built from; L is the longest response.
    """

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
        """Count the tokens that a forward pass on all ranks computes. Padding counts; shared prefixes count once."""
        return sum(rank.count_computed_tokens(padded) for rank in self.rank_batches)

    @cached_property
    def max_response_length(self) -> int:
        return max((int(rank.rows.response_lengths.max(initial=0)) for rank in self.rank_batches), default=0)

    def to_matrix(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Convert one flat column per rank ([sum responses] each) to [B, L], zero after each response. Same dtype."""
        matrix = np.zeros((self.num_rows, self.max_response_length), dtype=columns[0].dtype)
        for column, spans in zip(columns, self._spans, strict=True):
            for row, start, end in spans:
                matrix[row, : end - start] = column[start:end]
        return matrix

    def split_matrix_by_rank(self, matrix: np.ndarray, dtype: np.dtype | None = None) -> list[np.ndarray]:
        """Convert [B, L] to one flat column of `dtype` per rank ([sum responses] each). The inverse of to_matrix."""
        assert matrix.shape == (self.num_rows, self.max_response_length), (matrix.shape, self.num_rows)
        columns = []
        for rank, spans in zip(self.rank_batches, self._spans, strict=True):
            column = np.empty(rank.rows.response_offsets[-1], dtype or matrix.dtype)
            for row, start, end in spans:
                column[start:end] = matrix[row, : end - start]
            columns.append(column)
        return columns

    def split_row_values(self, values: np.ndarray) -> list[np.ndarray]:
        """Split [B], one value per row, into one array [R] per rank."""
        assert values.shape == (self.num_rows,), values.shape
        return [values[order] for order in self.row_order]

    @cached_property
    def _spans(self) -> list[list[tuple[int, int, int]]]:
        """For each rank and row: (row of the matrix, start and end of the response in a flat column).

        Copying row by row is faster than fancy indexing, whose index array is larger than the matrix.
        """
        spans = []
        for rank, order in zip(self.rank_batches, self.row_order, strict=True):
            offsets = rank.rows.response_offsets.tolist()
            spans.append(list(zip(order.tolist(), offsets[:-1], offsets[1:], strict=True)))
        return spans


@dataclass(frozen=True)
class FinetuningStepResult:
    """Result of one optimizer step in fine-tuning, equal on all ranks.

    Example: `FinetuningStepResult({"loss": 812.4, "tokens": 960.0}, {"grad_norm": 1.3, "lr": 1e-5, "steps_skipped": 0.0})`.
    """

    sums: dict[str, float]  # sums over all ranks and micro-batches, from which the task computes metrics
    metrics: dict[str, float]  # metrics of the optimizer step


def concatenate_segments(flat: np.ndarray, offsets: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """Concatenate the segments flat[offsets[p]:offsets[p + 1]] for each p in positions."""
    if not len(positions):
        return flat[:0]
    return np.concatenate([flat[offsets[p] : offsets[p + 1]] for p in positions])


def compute_offsets(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each of n concatenated segments, and the end of the last. int64 [n + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _concatenate(parts: Sequence[Sequence[int] | Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts]) if parts else np.zeros(0, dtype=dtype)


def _concatenate_experts(rows: Sequence[Row]) -> np.ndarray | None:
    """Concatenate the routed experts of all rows. Returns None if the engine did not return them."""
    arrays = [row.routed_experts for row in rows if row.routed_experts is not None]
    assert len(arrays) in (0, len(rows)), "routed experts are missing for some rows"
    return np.concatenate(arrays) if arrays else None
