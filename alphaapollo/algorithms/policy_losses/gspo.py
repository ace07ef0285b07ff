"""Losses with the importance ratio of a complete sequence.

gspo, gspo_token   geometric mean of the token ratios
sequence_ppo       PPO with the product of the token ratios
gmpo               geometric mean of token ratios that are clipped in log space
vespo              smooth weight of the product of the token ratios
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_range,
    compute_clip_metrics,
    register_policy_loss,
    token_sum,
)
from alphaapollo.algorithms.policy_losses.ppo import clipped_surrogate, policy_gradient
from alphaapollo.algorithms.statistics import apply_mask, clamp_log_ratio, log_ratio, row_mean
from alphaapollo.config.schema import Actor

RatioFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
PAPER_CLIP = (3e-4, 4e-4)
"""Default clip radii below and above 1 (arXiv 2507.18071, section 5.1)."""


def geometric_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Compute each row's geometric mean of the ratios pi/old (arXiv 2507.18071, Eq. 7). [B, L] -> [B], empty rows 1."""
    return clamp_log_ratio(row_mean(logp - old_logp, mask)).exp()


def sequence_log_ratio(logp: Tensor, base_logp: Tensor, mask: Tensor) -> Tensor:
    """Compute the sum of logp - base_logp over each row's tokens, without length normalization. [B, L] -> [B]."""
    return apply_mask(logp - base_logp, mask).sum(dim=1)


def product_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Compute the product of the ratios pi/old of each row's tokens; 1 for an empty row. [B, L] each -> [B]."""
    return clamp_log_ratio(sequence_log_ratio(logp, old_logp, mask)).exp()


def gspo_token_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, detached_logp: Tensor | None = None) -> Tensor:
    """Compute GSPO-token's ratio, with the value of the sequence's geometric_ratio and the gradient of the token ratio.

    [B, L] each -> [B, L] (arXiv 2507.18071, Eq. 14). detached_logp: constant copy of logp, by default logp.detach().
    """
    constant_logp = logp.detach() if detached_logp is None else detached_logp
    sequence_ratios = geometric_ratio(constant_logp, old_logp, mask)
    return sequence_ratios.unsqueeze(1) * apply_mask(logp - constant_logp, mask).exp()


def _register_clipped(name: str, ratio: RatioFunction, low: float, high: float, **declared: object) -> None:
    """Register PPO's clipped loss with another ratio. low, high: default clip radii below and above 1."""

    @register_policy_loss(name, zero_without_advantage=True, reads=CLIP, **declared)
    def compute_loss(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
        ratios = ratio(inputs.logp, inputs.old_logp, inputs.mask)
        advantages = row_mean(inputs.advantages, inputs.mask) if ratios.ndim == 1 else inputs.advantages
        return clipped_surrogate(ratios, advantages, inputs.mask, *clip_range(config, low, high))


_register_clipped("gspo", geometric_ratio, *PAPER_CLIP, level="sequence")
# One advantage per token (arXiv 2507.18071, Eq. 13). Equals GSPO if the advantages of a sequence are equal and
# loss_agg_mode=seq-mean-token-mean.
_register_clipped("gspo_token", gspo_token_ratio, *PAPER_CLIP, needs_full_sequence=True)
# The complete response is one action, as in RLOO (arXiv 2402.14740).
_register_clipped("sequence_ppo", product_ratio, 0.2, 0.2, level="sequence")


def gmpo_ratio(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Compute each row's geometric mean of token ratios, whose logarithms are clipped (arXiv 2507.20673).

    A log-ratio is clipped at high if the advantage of its row is at least 0, else at -low. logp, old_logp, mask [B, L],
    advantages [B]. Returns the means [B] (1 for an empty row), and a bool [B, L] that is True on clipped tokens.
    """
    d = log_ratio(logp, old_logp, mask)
    is_positive = (advantages >= 0).unsqueeze(1)
    clipped = torch.where(is_positive, d.clamp(max=high), d.clamp(min=-low))
    return row_mean(clipped, mask).exp(), clipped != d


@register_policy_loss("gmpo", zero_without_advantage=True, level="sequence", reads=CLIP)
def _gmpo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the GMPO loss of each sequence: -(mean advantage) * gmpo_ratio. clip_ratio* are bounds of log-ratios."""
    low, high = clip_range(config, 0.4, 0.4)
    advantages = row_mean(inputs.advantages, inputs.mask)
    ratio, clipped = gmpo_ratio(inputs.logp, inputs.old_logp, advantages, inputs.mask, low, high)
    share = row_mean(apply_mask(clipped.to(ratio.dtype), inputs.mask), inputs.mask)
    return PolicyLossOutput(-advantages * ratio, compute_clip_metrics(share, advantages > 0, inputs.mask))


Kernel = tuple[float, float]
"""Exponents (k, lambda) of the weight."""


def vespo_weight(log_w: Tensor, advantages: Tensor, positive: Kernel, negative: Kernel) -> Tensor:
    """Compute W^k exp(lambda (1 - W)) (arXiv 2602.10693, Eq. 17), which is 1 at W = 1 and goes to 0 on both sides.

    (k, lambda) is `positive` where the advantage is at least 0, else `negative`. log_w is broadcast to advantages. The
    weight is computed in log space, so that an extreme W gives 0.
    """
    if_positive, if_negative = ((k * log_w + decay * (1.0 - log_w.exp())).exp() for k, decay in (positive, negative))
    return torch.where(advantages >= 0, if_positive, if_negative)


@register_policy_loss(
    "vespo",
    zero_without_advantage=True,
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
