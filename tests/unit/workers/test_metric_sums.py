from __future__ import annotations

import torch

from alphaapollo.models.train_state import OptimizerStep
from alphaapollo.workers.model_worker import MetricSums, compute_optimizer_metrics


def test_names_that_end_in_max_keep_the_maximum() -> None:
    sums = MetricSums()
    for loss, ratio in ((1.0, 2.0), (3.0, 1.5)):
        sums.add({"loss": torch.tensor(loss), "ratio_max": torch.tensor(ratio)})
    assert {name: value.item() for name, value in sums.totals.items()} == {"loss": 4.0, "ratio_max": 2.0}


def test_metrics_of_optimizer_steps() -> None:
    steps = [OptimizerStep(grad_norm=norm, lr=lr) for norm, lr in ((0.5, 3.0), (1.0, 2.0), (3.0, 1.0))]
    steps.insert(1, OptimizerStep(grad_norm=float("inf"), lr=2.0, skipped=True))
    assert compute_optimizer_metrics(steps, grad_clip=1.0) == {
        "grad_norm": 1.5,
        "grad_norm_max": 3.0,
        "steps_skipped": 1.0,
        "grad_clipped": 1 / 3,
        "lr": 1.0,
    }
