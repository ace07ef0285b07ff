"""Zero advantages: the reward is not used for training."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.config.schema import Algorithm

NO_ESTIMATOR = "none"


@register_estimator(NO_ESTIMATOR, scope="trajectories", reads=())
def _return_zero_advantages(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Return zeros, for on-policy distillation alone (docs/algorithms/distill.md)."""
    return torch.zeros_like(trajectories.scores)
