"""algorithm.custom_module=examples/reference/estimator.py algorithm.adv_estimator=best_of_group"""

import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, Advantages, register_estimator
from alphaapollo.config.schema import Algorithm


@register_estimator("best_of_group", group=True)
def best_of_group(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Advantage 1 for the best samples of each prompt, 0 for the others."""
    advantages = torch.zeros_like(inputs.mask)
    for group in inputs.group_ids.unique():
        rows = inputs.group_ids == group
        is_best = inputs.scores[rows] == inputs.scores[rows].max()
        advantages[rows] = is_best.to(advantages.dtype).unsqueeze(1) * inputs.mask[rows]
    return Advantages(advantages, returns=advantages)
