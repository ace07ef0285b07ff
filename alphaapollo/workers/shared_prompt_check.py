"""Check that a model computes the same results with and without shared prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alphaapollo.batching.batch import RankBatch, Rows
from alphaapollo.batching.shared_prompts import SharedPrompts
from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.models.attention import uses_alphaapollo_backend
from alphaapollo.models.decoder import describe_stateful_layers, replace_placeholder_ids
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder, make_rows
from alphaapollo.models.sharding import FsdpRoot, reshard

KEY = "actor_rollout_ref.actor.use_prefix_grouper"
FINETUNING_KEY = "data.use_prefix_grouper"
# Allowed rounding, relative to the standard deviation of the values.
LIMIT = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25}
NUM_ROWS = 2  # rows of a batch to compare; with more, both layouts may not fit into memory


class SharedPromptCheck:
    """Comparison of a model's results with and without shared prompts, in the constructor and on the first batch.

    Args:
        compute_outputs: forward pass that returns one number per response token of a micro-batch.
        key: config key that enables shared prompts.
    """

    def __init__(
        self,
        root: FsdpRoot,
        compute_outputs: Callable[[MicroBatch], Tensor],
        builder: MicroBatchBuilder,
        dtype: torch.dtype,
        key: str = KEY,
    ):
        model: Any = root.model
        self.root, self.name, self.builder, self.key = root, type(model).__name__, builder, key
        self.compute_outputs, self.limit = compute_outputs, LIMIT[dtype]
        self.mismatch: float | None = None  # see _measure_mismatch; None: no batch with shared prompts so far
        self._unreported: dict[str, float] = {}
        self.unsupported_reason: str | None = None  # why the model cannot use shared prompts
        if stateful := describe_stateful_layers(model.config):
            self.unsupported_reason = f"{self.name} {stateful}"
        elif not uses_alphaapollo_backend(model):
            self.unsupported_reason = f"{self.name} has its own attention code"
        else:
            excluded = getattr(root, "excluded_ids", find_placeholder_ids(model.config))
            examples = _make_example_rows(model.config.get_text_config().vocab_size, excluded)
            mismatch = self._measure_mismatch(examples, [0, 1])
            if not mismatch <= self.limit:
                self.unsupported_reason = self._describe_mismatch(mismatch)

    def begin_update(self, batch: RankBatch) -> None:
        """Raise ValueError if sharing changes the results too much, in the first batch that shares prompts."""
        if self.mismatch is None and batch.rows.shared_prompts is not None:
            self.mismatch = self._measure_mismatch(batch.rows, batch.mini_batches[0].micro_batches[0][:NUM_ROWS])
            self._unreported = {"sharing_gap": self.mismatch}
            if not self.mismatch <= self.limit:
                raise ValueError(
                    f"{self.key}=true is not supported: {self._describe_mismatch(self.mismatch)}. Set {self.key}=false."
                )

    def pop_metrics(self) -> dict[str, float]:
        """Return the metric `sharing_gap`: the mismatch measured on the first batch. Later calls return {}."""
        metrics, self._unreported = self._unreported, {}
        return metrics

    def _describe_mismatch(self, mismatch: float) -> str:
        return (
            f"with {self.name}, the results of rows that share a prompt differ from those of separate rows by "
            f"{mismatch:.2g} standard deviations, but rounding explains at most {self.limit:g}"
        )

    @torch.no_grad()
    def _measure_mismatch(self, rows: Rows, row_indices: Sequence[int]) -> float:
        """Compute mean(|shared - plain|) / std(plain) of results with (shared) and without (plain) shared prompts."""
        shared, plain = (
            self.compute_outputs(self.builder.build(layout, row_indices)).float()
            for layout in (rows, replace(rows, shared_prompts=None))
        )
        reshard(self.root)
        deviation = plain.std(correction=0).clamp(min=1e-6)  # small for a model near its random initialization
        return float((shared - plain).abs().mean() / deviation)


def _make_example_rows(vocabulary_size: int, placeholder_ids: Sequence[int]) -> Rows:
    """Make two token sequences, with prompts of six and five tokens that share the first five tokens.
    `placeholder_ids`: tokens that cannot be text."""
    prompt = np.arange(5) * 37 + 11
    texts = [np.append(prompt, [3, 1, 4, 1]) % vocabulary_size, np.append(prompt, [5, 9, 2]) % vocabulary_size]
    texts = [replace_placeholder_ids(text, placeholder_ids) for text in texts]
    return make_rows(texts, [6, 5], SharedPrompts(np.zeros(2, dtype=np.int64), np.full(2, 5)))
