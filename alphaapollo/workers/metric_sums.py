"""Sums of metrics over micro-batches and ranks, and metrics of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.models.training.train_state import OptimizerStep

MAX_SUFFIX = "_max"


class MetricSums:
    """Sums of metrics over micro-batches and ranks; maxima for names that end in _max.

    `add` does not wait for the GPU. All ranks of `group` (None: all ranks) must add the same names.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.totals: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().double()
            if name in self.totals:
                combine = torch.maximum if name.endswith(MAX_SUFFIX) else torch.add
                value = combine(self.totals[name], value)
            self.totals[name] = value

    def reduce(self, device: torch.device) -> dict[str, float]:
        """Return the sums and maxima over all ranks. All ranks of the group must call this (a collective)."""
        reduced: dict[str, float] = {}
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            is_max = operation == dist.ReduceOp.MAX
            names = sorted(name for name in self.totals if name.endswith(MAX_SUFFIX) is is_max)
            if names:
                totals = torch.stack([self.totals[name].to(device) for name in names])
                dist.all_reduce(totals, operation, group=self.group)
                reduced |= dict(zip(names, totals.tolist(), strict=True))
        return reduced


def compute_optimizer_metrics(steps: Sequence[OptimizerStep], grad_clip: float) -> dict[str, float]:
    """Compute gradient norm, clipping and learning rate of optimizer steps. Leaves out norms of skipped steps."""
    norms = [step.grad_norm for step in steps if not step.skipped] or [math.nan]
    return {
        "grad_norm": sum(norms) / len(norms),
        "grad_norm_max": max(norms),
        "grad_clipped": sum(norm > grad_clip for norm in norms) / len(norms),
        "lr": steps[-1].lr,
        "steps_skipped": float(sum(step.skipped for step in steps)),
    }
