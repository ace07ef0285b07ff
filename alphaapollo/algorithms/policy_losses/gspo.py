"""Losses with a sequence-level importance ratio: GSPO, GSPO-token, and PPO on complete sequences."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.masked import apply_mask, clamp_log_ratio, row_mean
from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_range,
    register_policy_loss,
)
from alphaapollo.algorithms.policy_losses.ppo import clipped_surrogate
from alphaapollo.config.schema import Actor

PAPER_CLIP = (3e-4, 4e-4)
"""Default clip radii below and above 1 (arXiv 2507.18071, section 5.1)."""


def geometric_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Compute each row's geometric mean of the ratios pi/old (arXiv 2507.18071, Eq. 7). [B, L] -> [B], empty rows 1."""
    return clamp_log_ratio(row_mean(logp - old_logp, mask)).exp()


def product_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Compute the product of the ratios pi/old of each row's tokens; 1 for an empty row. [B, L] each -> [B]."""
    return clamp_log_ratio(apply_mask(logp - old_logp, mask).sum(dim=1)).exp()


def gspo_token_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, detached_logp: Tensor | None = None) -> Tensor:
    """Compute GSPO-token's ratio, with the value of the sequence's geometric_ratio and the gradient of the token ratio.

    [B, L] each -> [B, L] (arXiv 2507.18071, Eq. 14). detached_logp: constant copy of logp, by default logp.detach().
    """
    constant_logp = logp.detach() if detached_logp is None else detached_logp
    sequence = geometric_ratio(constant_logp, old_logp, mask)
    return sequence.unsqueeze(1) * apply_mask(logp - constant_logp, mask).exp()


@register_policy_loss("gspo", level="sequence", reads=CLIP)
def _gspo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the GSPO loss -min(s A, clip(s) A) of each sequence, with its geometric_ratio s and mean advantage A."""
    ratio = geometric_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    advantages = row_mean(inputs.advantages, inputs.mask)
    return clipped_surrogate(ratio, advantages, inputs.mask, *clip_range(config, *PAPER_CLIP))


@register_policy_loss("gspo_token", reads=CLIP, needs_full_sequence=True)
def _gspo_token(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the GSPO-token loss, which has one advantage per token (arXiv 2507.18071, Eq. 13).

    Equals GSPO if the advantages of a sequence are equal and loss_agg_mode=seq-mean-token-mean.
    """
    ratio = gspo_token_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    return clipped_surrogate(ratio, inputs.advantages, inputs.mask, *clip_range(config, *PAPER_CLIP))


@register_policy_loss("sequence_ppo", level="sequence", reads=CLIP)
def _sequence_ppo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute PPO's clipped loss with the complete response as one action, as in RLOO (arXiv 2402.14740)."""
    ratio = product_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    advantages = row_mean(inputs.advantages, inputs.mask)
    return clipped_surrogate(ratio, advantages, inputs.mask, *clip_range(config, 0.2, 0.2))
