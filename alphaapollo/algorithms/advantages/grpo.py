"""GRPO and Dr. GRPO: the group mean is the baseline."""

from __future__ import annotations

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, from_scores, register_estimator
from alphaapollo.algorithms.group_statistics import center_in_groups, normalize_in_groups
from alphaapollo.config.schema import Algorithm


@register_estimator("grpo", group=True, reads=("norm_adv_by_std_in_grpo",))
def _grpo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Compute (R - mean) / (std + eps) within each group (arXiv 2402.03300, section 4.1.2)."""
    return from_scores(inputs, center_in_groups if config.norm_adv_by_std_in_grpo is False else normalize_in_groups)


@register_estimator("dr_grpo", group=True, reads=())
def _dr_grpo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Compute R - mean within each group (arXiv 2503.20783). Use with loss_agg_mode=seq-mean-token-sum-norm."""
    return from_scores(inputs, center_in_groups)
