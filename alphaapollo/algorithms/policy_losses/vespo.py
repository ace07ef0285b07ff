"""VESPO: a smooth weight of the importance ratio of the complete sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import apply_mask
from alphaapollo.algorithms.policy_losses.base import (
    PolicyLossInputs,
    PolicyLossOutput,
    register_policy_loss,
    token_sum,
)
from alphaapollo.algorithms.policy_losses.reinforce import policy_gradient
from alphaapollo.config.schema import Actor

Kernel = tuple[float, float]
"""Exponents (k, lambda) of the weight."""


def sequence_log_ratio(logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Tensor:
    """Compute log W, the sum of log(pi/mu) over each row's tokens, without length normalization. [B, L] -> [B]."""
    return apply_mask(logp - rollout_logp, mask).sum(dim=1)


def vespo_weight(log_w: Tensor, advantages: Tensor, positive: Kernel, negative: Kernel) -> Tensor:
    """Compute W^k exp(lambda (1 - W)) (arXiv 2602.10693, Eq. 17), which is 1 at W = 1 and goes to 0 on both sides.

    (k, lambda) is `positive` where the advantage is at least 0, else `negative`. log_w is broadcast to advantages. The
    weight is computed in log space, so that an extreme W gives 0.
    """
    of_positive, of_negative = ((k * log_w + decay * (1.0 - log_w.exp())).exp() for k, decay in (positive, negative))
    return torch.where(advantages >= 0, of_positive, of_negative)


@register_policy_loss(
    "vespo",
    anchor="rollout",
    reads=("policy_loss.vespo_positive", "policy_loss.vespo_negative"),
    needs_full_sequence=True,
)
def _vespo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the VESPO loss -sg[weight] A log pi (arXiv 2602.10693, Eq. 20).

    inputs.old_logp are the engine's log-probs, because the loss has anchor="rollout".
    """
    options = config.policy_loss
    log_w = sequence_log_ratio(inputs.logp.detach(), inputs.old_logp, inputs.mask).unsqueeze(1)
    weight = vespo_weight(log_w, inputs.advantages, options.vespo_positive, options.vespo_negative)
    loss = policy_gradient(inputs.logp, weight * inputs.advantages)
    return PolicyLossOutput(loss, {"vespo_weight": token_sum(weight, inputs.mask)})
