"""GSPO and GSPO-token (sequence-level importance ratio), and PPO on the ratio of the completion."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.masked import MAX_LOG_RATIO, apply_mask, clamp_symmetric, log_ratio, row_mean
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
"""Clip radii of arXiv 2507.18071, section 5.1. A mean of log-ratios varies much less than a single log-ratio."""


def geometric_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """Compute s_i = exp(1/|o_i| sum_t (log pi - log old)) (arXiv 2507.18071, Eq. 7). [B, L] -> [B]; empty row: 1."""
    return clamp_symmetric(row_mean(log_ratio(logp, old_logp, mask, limit=None), mask), limit).exp()


def product_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """Compute prod_t pi/old, the ratio of the completion as one action; 1 for an empty row. [B, L] -> [B]."""
    return clamp_symmetric(log_ratio(logp, old_logp, mask, limit=None).sum(dim=1), limit).exp()


def gspo_token_ratio(
    logp: Tensor, old_logp: Tensor, mask: Tensor, logp_sg: Tensor | None = None, limit: float | None = MAX_LOG_RATIO
) -> Tensor:
    """Compute s_it = sg[s_i] pi / sg[pi]: value of the sequence ratio, gradient of the token ratio (Eq. 14).

    [B, L] -> [B, L]. logp_sg: log-probs in place of sg[logp].
    """
    constant_logp = logp.detach() if logp_sg is None else logp_sg
    sequence = geometric_ratio(constant_logp, old_logp, mask, limit)
    return sequence.unsqueeze(1) * apply_mask(logp - constant_logp, mask).exp()


@register_policy_loss("gspo", level="sequence", reads=CLIP)
def _gspo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute -min(s A, clip(s) A) per sequence (Eq. 5), where A is the mean advantage of the row."""
    ratio = geometric_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    advantages = row_mean(inputs.advantages, inputs.mask)
    return clipped_surrogate(ratio, advantages, inputs.mask, *clip_range(config, *PAPER_CLIP))


@register_policy_loss("gspo_token", reads=CLIP, needs_full_sequence=True)
def _gspo_token(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute GSPO with one advantage per token (Eq. 13).

    Equals gspo if the advantages of a row are equal and the aggregation is seq-mean-token-mean.
    """
    ratio = gspo_token_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    return clipped_surrogate(ratio, inputs.advantages, inputs.mask, *clip_range(config, *PAPER_CLIP))


@register_policy_loss("sequence_ppo", level="sequence", reads=CLIP)
def _sequence_ppo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute PPO's clipped loss with the completion as one action, as in RLOO (arXiv 2402.14740)."""
    ratio = product_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    advantages = row_mean(inputs.advantages, inputs.mask)
    return clipped_surrogate(ratio, advantages, inputs.mask, *clip_range(config, 0.2, 0.2))
