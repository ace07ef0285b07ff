"""Zero advantages: the reward is not used for training."""

from __future__ import annotations

import torch

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, register_estimator
from alphaapollo.config.schema import Algorithm

NO_ESTIMATOR = "none"


@register_estimator(NO_ESTIMATOR, reads=())
def _return_zero_advantages(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Return zeros, for training from a teacher alone (docs/algorithms/distill.md)."""
    zeros = torch.zeros_like(inputs.token_rewards)
    return Advantages(zeros, zeros)
