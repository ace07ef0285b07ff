"""Losses of a user's own loop (own_loop/), given as a function of log-probs and columns.

The loss is a sum over the tokens of all ranks, divided by a denominator that the caller chooses. Therefore neither
value nor gradient depends on the split into calls, ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from alphaapollo.algorithms.user_functions import check_float_tensor, explain_user_errors
from alphaapollo.batching.batch import TARGETS, WEIGHTS
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.moe_routing import ROUTED_EXPERTS
from alphaapollo.types import LONGER_PROMPT
from alphaapollo.utils.kept_tokens import KEPT_TOKENS

LossFunction = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""(log-probs [b, L], columns [b, L] or [b]) -> loss of each token [b, L], or of each row [b]. Column 0 is for
the first token that the row is trained on."""
INTERNAL_COLUMNS = (TARGETS, LONGER_PROMPT, TEACHER_SHARES, ROUTED_EXPERTS, KEPT_TOKENS)  # not passed to loss functions


def cross_entropy(logp: Tensor, columns: dict[str, Tensor]) -> Tensor:
    return -logp


@dataclass(frozen=True)
class UserLoss:
    """Loss of a user's function, summed over tokens with their weights, or over rows."""

    function: LossFunction
    denominator: float  # divides the sum over all ranks

    def __call__(self, micro: MicroBatch, logprobs: Tensor, builder: MicroBatchBuilder) -> tuple[Tensor, Tensor]:
        """Compute a micro-batch's share of the loss, and the number of tokens or rows that it is summed over."""
        if micro.is_dummy:
            return logprobs.sum() * 0.0, micro.mask.sum()
        columns, logp = make_function_columns(micro, builder), micro.to_matrix(logprobs)
        with explain_user_errors(self.function, "the loss"):
            losses = self.function(logp, dict(columns))
            shape = logp.shape if getattr(losses, "ndim", 2) == 2 else logp.shape[:1]
            check_float_tensor("the result", losses, shape)
            if not losses.requires_grad:
                raise ValueError("the result does not depend on the log-probs")
            mask = columns["mask"].bool()
            count = (mask if losses.ndim == 2 else mask.any(dim=1)).sum()
            if losses.ndim == 2:
                losses = losses.where(mask, 0.0) * columns[WEIGHTS]
            if not losses.isfinite().all():
                bad = losses.detach().flatten()[~losses.isfinite().flatten()][:4].tolist()
                raise ValueError(f"the loss is not finite: {bad}. Check the columns and the weights of the rows")
            return losses.sum() / self.denominator, count


def make_function_columns(micro: MicroBatch, builder: MicroBatchBuilder) -> dict[str, Tensor]:
    """Return the columns of a micro-batch's rows, with `mask` (1 on trained tokens) and `weights` of tokens."""
    columns: dict[str, Any] = {"mask": micro.mask, WEIGHTS: micro.mask, **micro.rows.columns}  # default weights: 1
    for name in INTERNAL_COLUMNS:
        columns.pop(name, None)
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            array = micro.rows.take_responses(column) if isinstance(column, np.ndarray) else np.array(column)
            columns[name] = builder.to_device(array)
        if not isinstance(column, tuple):  # one value per token, not per row
            columns[name] = micro.to_matrix(columns[name])
    return columns
