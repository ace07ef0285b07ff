"""Rows (token sequences to train on) of a user's loop: make and check them, and distribute them to the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaapollo.batching.batch import TARGETS, WEIGHTS, BatchLayout
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.schema import Model
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.launch.plan import Plan
from alphaapollo.models.load import load_config
from alphaapollo.types import LONGER_PROMPT, Row
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens

TUPLE_COLUMNS = (LONGER_PROMPT, TEACHER_SHARES)  # columns with a tuple per row
PER_ROW_COLUMNS = (*TUPLE_COLUMNS, KEPT_TOKENS)


def make_row(
    token_ids: Sequence[int],
    weights: Sequence[float] | None = None,
    targets: Sequence[int] | None = None,
    **columns: object,
) -> Row:
    """Make a row to train on from T tokens.

    Args:
        weights: weight of each token in the loss; tokens of weight 0 are only read. None: 1, but 0 for the first.
        targets: at each position the token to predict from the tokens before it; None: the row's own tokens.
        columns: inputs of the loss, each a number or a sequence of T numbers.
    """
    length = len(token_ids)
    mask = [0] + [1] * (length - 1) if weights is None else [int(weight != 0) for weight in weights]
    given = {TARGETS: targets, WEIGHTS: weights, **columns}
    row_columns = {name: value for name, value in given.items() if value is not None}
    return Row(list(token_ids), mask, [math.nan] * length, [length - 1], columns=row_columns)


@dataclass(frozen=True)
class GradientResult:
    """Result of one `forward_backward`, over all ranks."""

    loss: float
    num_tokens: int  # trained tokens
    logprobs: list[np.ndarray]  # of each row, [T], before the step; 0 for tokens not trained on
    metrics: dict[str, float]  # of a policy loss: means over trained tokens, or over rows for a loss of rows


@dataclass(frozen=True)
class RowReader:
    """Checker of rows against the length and the vocabulary of the model."""

    max_length: int | None  # tokens that the model reads at most; None: unknown
    vocabulary_size: int
    excluded: tuple[int, ...] = ()  # ids that are never sampled, so they cannot be targets

    @classmethod
    def for_model(cls, model: Model) -> RowReader:
        text = load_config(model).get_text_config()
        excluded = find_excluded_ids(model.path, model.tokenizer_path, model.trust_remote_code)
        return cls(getattr(text, "max_position_embeddings", None), int(text.vocab_size), tuple(excluded))

    def read(self, rows: Sequence[Row], columns: Mapping[str, Sequence[object]] | None = None) -> list[Row]:
        """Return the rows with further columns, given as one entry per row. Raises ValueError for rows that cannot be
        trained on."""
        columns = columns or {}
        for name, column in columns.items():
            if len(column) != len(rows):
                raise ValueError(f"{name} has {len(column)} entries for {len(rows)} rows. Pass one for each row.")
        all_names = dict.fromkeys([*(name for row in rows for name in row.columns), *columns])
        names = [name for name in all_names if name not in PER_ROW_COLUMNS]
        new_columns = [{name: column[number] for name, column in columns.items()} for number in range(len(rows))]
        return [self._read_row(f"row {number}", row, new_columns[number], names) for number, row in enumerate(rows)]

    def _read_row(self, label: str, row: Row, columns: Mapping[str, object], names: Sequence[str]) -> Row:
        """Check a row. names: columns of numbers that each row must have."""
        ids, trained, checked_columns = np.asarray(row.token_ids), np.asarray(row.action_mask), dict[str, Any]()
        if self.max_length is not None and len(ids) > self.max_length:
            raise ValueError(f"{label} has {len(ids)} tokens, but the model reads at most {self.max_length}. Cut it.")
        values = {TARGETS: ids, WEIGHTS: trained, **row.columns, **columns}
        checked_columns |= {name: tuple(values[name]) for name in TUPLE_COLUMNS if name in values}
        for name in names:
            value = np.asarray(values.get(name))
            if value.dtype == object or (value.ndim and len(value) != len(ids)):
                got = f"has {len(value)} values for {len(ids)} tokens" if value.ndim else "is missing"
                raise ValueError(f"{label}: its column {name} {got}. Pass a number, or a number per token.")
            checked_columns[name] = value if value.ndim else value.item()
        weights = checked_columns.get(WEIGHTS, 1.0)
        weights = weights if isinstance(weights, np.ndarray) else weights * trained
        if not weights.any() or weights[0]:
            raise ValueError(f"{label} must be trained on some token, but not on its first one. Set its weights.")
        targets = checked_columns.get(TARGETS, ids)[weights != 0]
        for noun, checked, excluded in (("token", ids, ()), ("target", targets, self.excluded)):
            wrong = checked[(checked < 0) | (checked >= self.vocabulary_size) | np.isin(checked, excluded)]
            if len(wrong):
                size = self.vocabulary_size
                raise ValueError(f"{label}: the {noun} {wrong[0]} is outside the model's vocabulary of {size} tokens.")
        if KEPT_TOKENS in values and np.array_equal(values[TARGETS], ids):  # other targets were not sampled
            checked_columns[KEPT_TOKENS] = self._read_kept_tokens(label, values[KEPT_TOKENS], ids, weights != 0)
        checked_columns |= {WEIGHTS: weights} if WEIGHTS in checked_columns else {}
        is_sampled = (trained != 0) & (checked_columns.get(TARGETS, ids) == ids)
        logprobs = np.where(weights == 0, 0.0, np.where(is_sampled, row.logprobs, math.nan)).tolist()
        return replace(row, columns=checked_columns, action_mask=(weights != 0).astype(int).tolist(), logprobs=logprobs)

    def _read_kept_tokens(self, label: str, given: object, ids: np.ndarray, is_trained: np.ndarray) -> bytes:
        """Check and encode the kept tokens of a row: KeptTokens, or their encoding, of T positions, or of T - 1 as in a
        completion."""
        kept = KeptTokens.decode(given) if isinstance(given, bytes) else given
        if not isinstance(kept, KeptTokens) or len(kept) not in (len(ids), len(ids) - 1):
            got = f"{len(kept)} sets" if isinstance(kept, KeptTokens) else f"a {type(kept).__name__}"
            raise ValueError(
                f"{label}: its column {KEPT_TOKENS} has {got} for {len(ids)} tokens. Pass KeptTokens with a set for "
                "each token but the last, from which the next token was sampled."
            )
        wrong = kept.ids[(kept.ids < 0) | (kept.ids >= self.vocabulary_size)]
        if len(wrong):
            size = self.vocabulary_size
            raise ValueError(f"{label}: the kept token {wrong[0]} is outside the model's vocabulary of {size} tokens.")
        kept = kept[: len(ids) - 1]
        for position in kept.find_outside(ids[1:]) + 1:
            if is_trained[position]:
                raise ValueError(
                    f"{label}: the token {ids[position]} at position {position} is not among the "
                    f"{kept.sizes[position - 1]} tokens in its column {KEPT_TOKENS}. Pass the sets of this row."
                )
        return KeptTokens.concatenate([kept, KeptTokens.of_sets([()])]).encode()


def distribute(rows: Sequence[Row], plan: Plan, groups: Sequence[object] | None = None) -> BatchLayout:
    """Distribute rows to ranks and micro-batches. groups: group of each row; the rows of a group stay together."""
    if not rows:
        raise ValueError("there are no rows. Pass at least one.")
    ids = number_groups(len(rows), groups)
    sizes = plan.placement.data_parallel_size, len(rows), plan.max_tokens, plan.padded
    return build_batch_layout(rows, ids, *sizes, needs_full_sequence=groups is not None)


def number_groups(num_rows: int, groups: Sequence[object] | None) -> list[int]:
    """Return the number of each row's group. None: each row is a group of its own."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups or ()))}
    return [*range(num_rows)] if groups is None else [numbers[group] for group in groups]


def split_by_row(layout: BatchLayout, rows: Sequence[Row], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return an array [T] per row from values of the response tokens of each rank; 0 for tokens not trained on."""
    parts = np.split(layout.join_columns(values), layout.response_offsets[1:-1])
    masks = [np.asarray(row.action_mask) != 0 for row in rows]
    padded = [np.pad(part, (len(mask) - len(part), 0)) for part, mask in zip(parts, masks, strict=True)]
    return [np.where(mask, row_values, 0.0) for mask, row_values in zip(masks, padded, strict=True)]
