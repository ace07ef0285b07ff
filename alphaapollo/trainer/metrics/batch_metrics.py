"""What one iteration's metrics say of its batch: rewards to advantages, layout, speed. docs/metrics.md explains each
name."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from alphaapollo.data.batch import TrainBatch
from alphaapollo.types import Trajectory


def advantage_metrics(advantages: Tensor, mask: Tensor, has_advantage: np.ndarray) -> dict[str, float]:
    """advantages and mask [B, L]; has_advantage: bool [B], rows with one that is not 0."""
    own = torch.from_numpy(advantages.numpy()[mask.numpy() != 0])  # numpy selects several times quicker than torch
    if not own.numel():
        return {}
    low, high = torch.aminmax(own)
    return {
        "advantage/mean": float(own.mean()),
        "advantage/std": float(own.std(correction=0)),
        "advantage/min": float(low),
        "advantage/max": float(high),
        "advantage/abs_mean": float(own.abs().mean()),
        "advantage/share_zero": float((~has_advantage).mean()),
    }


def length_penalty(unshaped: list[Trajectory], worth: Tensor, invalid_action_cost: float) -> float:
    """What the shaping by length took off, the mean over trajectories. `worth` [N]: their rewards after all shaping but
    the KL's; `invalid_action_cost`: of a turn whose action could not be read."""
    before = sum(one.reward - invalid_action_cost * sum(not turn.valid for turn in one.turns) for one in unshaped)
    return before / len(unshaped) - float(worth.mean())


def layout_metrics(layout: TrainBatch, padded: bool, lost: int, trained: int) -> dict[str, float]:
    """How the rows lie in the forward passes. `lost`: trajectories of the batch's groups that are not trained on."""
    loads = [rank.computed_tokens(padded=False) for rank in layout.rank_batches]
    cells = layout.computed_tokens(padded)
    return {
        "batch/trajectories": float(trained),
        "batch/lost": float(lost),
        "batch/rows": float(layout.num_rows),
        "batch/tokens": float(layout.num_tokens),
        "batch/sharing": layout.num_tokens / sum(loads),
        "batch/micro_batches": float(sum(len(step.micro_batches) for step in layout.rank_batches[0].mini_batches)),
        "batch/padding": 1 - sum(loads) / cells,
        "batch/rank_imbalance": max(loads) * len(loads) / sum(loads) - 1,
    }


def speed_metrics(tokens: int, update: float, step: float, num_gpus: int) -> dict[str, float]:
    """`tokens`: of the rows trained on, prompts and responses; `update`, `step`: seconds; `num_gpus`: 0 on a CPU."""
    metrics = {}
    if update:
        metrics["perf/train_tokens_per_second"] = tokens / update
    if num_gpus and step:
        metrics["perf/tokens_per_second_per_gpu"] = tokens / step / num_gpus
    return metrics
