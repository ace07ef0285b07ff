"""Is the layout that computes shared prompts once the plain one in all but time? Asked of each trained model at its
start, on made-up rows, and of its first batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alphaapollo.data.batch import RankBatch, Rows
from alphaapollo.data.shared_prompts import Prefixes
from alphaapollo.models.attention.backends import is_ours
from alphaapollo.models.micro_batch import MicroBatch, build_micro_batch
from alphaapollo.models.sharding import reshard
from alphaapollo.models.ulysses import SequenceGroup, kinds_with_state

KEY = "actor_rollout_ref.actor.use_prefix_grouper"
# Of rounding, relative to how much the numbers vary.
LIMIT = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25}
ROWS = 2  # of a batch: both layouts of more might not fit into memory


class SharedPromptCheck:
    """Of one model on one rank; every method is a collective.

    Args:
        root: the FSDP root around transformers' `model`, which gives its name and configuration.
        compute: a micro-batch -> a number for each of its response tokens, [n].
        dtype: of the arithmetic.
        key: that asks for shared prompts.
    """

    def __init__(
        self,
        root: nn.Module,
        model: Any,
        compute: Callable[[MicroBatch], Tensor],
        dtype: torch.dtype,
        padded: bool,
        device: torch.device,
        sequence: SequenceGroup | None,
        key: str = KEY,
    ):
        self.root, self.name, self.compute, self.key = root, type(model).__name__, compute, key
        self.padded, self.device, self.sequence = padded, device, sequence
        self.limit = LIMIT[dtype]
        self.gap: float | None = None  # of the first batch
        self.told = False
        self.problem: str | None = f"{self.name} brings its own attention"
        kinds = kinds_with_state(model.config)
        if kinds:
            self.problem = f"{self.name} has layers of kind {', '.join(sorted(kinds))}, which look beyond their token"
        elif is_ours(model):
            gap = self._gap(_made_up(model.config.get_text_config().vocab_size), [0, 1])
            self.problem = None if gap <= self.limit else f"with {self.name} {self._off(gap)}"

    def check_batch(self, batch: RankBatch) -> None:
        """Compare on rows of the first batch that shares. ValueError: the layouts differ."""
        if self.gap is None and batch.rows.prefixes is not None:
            self.gap = self._gap(batch.rows, batch.mini_batches[0].micro_batches[0][:ROWS])
            if not self.gap <= self.limit:
                raise ValueError(f"{self.key}: with {self.name} {self._off(self.gap)}. Set it to false.")

    def figures(self) -> dict[str, float]:
        """The gap of the first batch, once."""
        if self.gap is None or self.told:
            return {}
        self.told = True
        return {"sharing_gap": self.gap}

    def _off(self, gap: float) -> str:
        return (
            f"rows that share a prompt come out otherwise than one by one (by {gap:.2g} of how much they vary; "
            f"{self.limit:g} would be rounding): a layer looks beyond its token outside of attention, or does not hand "
            "on what attention needs"
        )

    @torch.no_grad()
    def _gap(self, rows: Rows, positions: Sequence[int]) -> float:
        layouts = (rows, replace(rows, prefixes=None))
        shared, plain = (
            self.compute(build_micro_batch(one, positions, self.padded, self.device, sequence=self.sequence)).float()
            for one in layouts
        )
        reshard(self.root)
        spread = plain.std(correction=0).clamp(min=1e-6)  # a model near its random start gives all tokens much the same
        return float((shared - plain).abs().mean() / spread)


def _made_up(vocabulary: int) -> Rows:
    """Two rows that share five tokens of six and of five."""
    prompt = np.arange(5) * 37 + 11
    texts = [np.append(prompt, [3, 1, 4, 1]) % vocabulary, np.append(prompt, [5, 9, 2]) % vocabulary]
    starts = np.array([6, 5])
    lengths = np.array([len(text) for text in texts])
    count = int((lengths - starts).sum())
    return Rows(
        token_ids=np.concatenate(texts),
        lengths=lengths,
        response_starts=starts,
        action_mask=np.ones(count, dtype=np.uint8),
        rollout_logprobs=np.zeros(count, dtype=np.float32),
        prefixes=Prefixes(np.zeros(2, dtype=np.int64), np.full(2, 5)),
    )
