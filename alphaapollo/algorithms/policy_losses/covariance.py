"""Clip-Cov and KL-Cov: preserve entropy by restricting tokens with a high covariance of log-prob and advantage.

Source: arXiv 2505.22617. The covariance is over the tokens of a mini-batch (section 4.2); the authors' code uses
micro-batches. Tokens are selected with the log-probs of the policy before its first step on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import apply_mask, log_ratio, masked_mean
from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_range,
    register_policy_loss,
    token_sum,
)
from alphaapollo.algorithms.policy_losses.ppo import clipped_surrogate
from alphaapollo.config.schema import Actor


def token_covariance(logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute each token's term of the covariance of advantage and log-prob; 0 outside the mask. [B, L] -> [B, L]."""
    logp = logp.detach()
    return apply_mask((advantages - masked_mean(advantages, mask)) * (logp - masked_mean(logp, mask)), mask)


def find_clip_cov_candidates(
    covariance: Tensor, clipped: Tensor, mask: Tensor, ratio: float, low: float, high: float
) -> tuple[Tensor, int]:
    """Return the tokens from which Clip-Cov draws (bool [B, L]), and how many of them it draws. Tensors: [B, L].

    These are the tokens with low < covariance < high that PPO has not clipped. The number is the share `ratio` of all
    tokens in the mask, at least one, and at most the number of candidates.
    """
    candidates = (covariance > low) & (covariance < high) & ~clipped & mask.bool()
    return candidates, min(_count_selected_tokens(ratio, mask), int(candidates.sum()))


def top_covariance_tokens(covariance: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """Select the share `ratio` of tokens (at least one) with the largest covariance. [B, L] each -> bool [B, L]."""
    positions = mask.bool().flatten().nonzero().squeeze(1)
    order = covariance.flatten()[positions].argsort(descending=True, stable=True)[: _count_selected_tokens(ratio, mask)]
    top = torch.zeros_like(mask, dtype=torch.bool).flatten()
    top[positions[order]] = True
    return top.view_as(mask)


def kl_cov(log_ratio: Tensor, advantages: Tensor, selected: Tensor, coef: float) -> Tensor:
    """Compute the KL-Cov loss: -ratio * advantage, plus coef * |log_ratio| on the selected tokens. All [B, L]."""
    return -log_ratio.exp() * advantages + torch.where(selected, coef * log_ratio.abs(), torch.zeros_like(log_ratio))


def _count_selected_tokens(ratio: float, mask: Tensor) -> int:
    return max(1, int(ratio * int(mask.bool().sum())))


def _select_clipped_tokens(logp: Tensor, advantages: Tensor, config: Actor) -> Tensor:
    """Select the tokens whose loss Clip-Cov sets to 0. The n tokens are in random order, so the first candidates, as
    many as find_clip_cov_candidates returns, are a random draw. [n] each -> bool [n]."""
    options, mask = config.policy_loss, torch.ones_like(logp)
    candidates, count = find_clip_cov_candidates(
        token_covariance(logp, advantages, mask),
        torch.zeros_like(mask, dtype=torch.bool),  # before the first step nothing is clipped
        mask,
        options.clip_cov_ratio,
        options.clip_cov_lb,
        options.clip_cov_ub,
    )
    return candidates & (candidates.cumsum(0) <= count)


@register_policy_loss(
    "clip_cov",
    zero_without_advantage=True,
    reads=(*CLIP, "policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub"),
    select_tokens=_select_clipped_tokens,
)
def _clip_cov(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute PPO's clipped loss, with loss 0 on the selected tokens, which still count in the denominator."""
    assert inputs.selected_tokens is not None
    low, high = clip_range(config, 0.2, 0.2)
    ratio = log_ratio(inputs.logp, inputs.old_logp, inputs.mask).exp()
    output = clipped_surrogate(ratio, inputs.advantages, inputs.mask, low, high)
    fraction = token_sum(inputs.selected_tokens, inputs.mask)
    return PolicyLossOutput(
        apply_mask(output.loss, ~inputs.selected_tokens), output.metrics | {"clip_cov_fraction": fraction}
    )


def _select_top_covariance_tokens(logp: Tensor, advantages: Tensor, config: Actor) -> Tensor:
    """Select the tokens with the largest covariance, on which KL-Cov adds a KL penalty. [n] each -> bool [n]."""
    mask = torch.ones_like(logp)
    return top_covariance_tokens(token_covariance(logp, advantages, mask), mask, config.policy_loss.kl_cov_ratio)


@register_policy_loss(
    "kl_cov", reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"), select_tokens=_select_top_covariance_tokens
)
def _kl_cov(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    assert inputs.selected_tokens is not None
    d = log_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    loss = kl_cov(d, inputs.advantages, inputs.selected_tokens, config.policy_loss.ppo_kl_coef)
    return PolicyLossOutput(loss, {"kl_cov_fraction": token_sum(inputs.selected_tokens, inputs.mask)})
