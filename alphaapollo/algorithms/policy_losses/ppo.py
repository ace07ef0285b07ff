"""Losses with the importance ratio of each token.

ppo         clipped surrogate, with asymmetric bounds (DAPO's clip-higher) and the dual clip
ppo_kl      surrogate without a clip, with a penalty on the KL to the old policy
surrogate   surrogate without a clip or penalty, for optimizers that limit the KL (TRPO)
cispo       clips the importance weight instead of the gradient
sapo        a soft gate instead of the hard clip
reinforce   plain policy gradient, without a ratio
dppo_tv, dppo_kl    drop tokens whose probability moved too far from the rollout engine's, instead of clipping
clip_cov, kl_cov    preserve entropy by restricting tokens with a high covariance of log-prob and advantage (arXiv
                    2505.22617). The covariance is over the tokens of a mini-batch (section 4.2); the authors' code uses
                    micro-batches. Tokens are selected with the log-probs before the first step on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from alphaapollo.algorithms.kl import kl_penalty
from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_range,
    compute_clip_metrics,
    register_policy_loss,
    token_sum,
)
from alphaapollo.algorithms.statistics import apply_mask, masked_mean
from alphaapollo.config.schema import Actor


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """Compute PPO's loss -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, Eq. 7). Any equal shapes.

    With dual_clip c > 1, the loss is at most -c A where A < 0 (arXiv 1912.09729, Eq. 5).
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where PPO clips: ratio > 1 + high and A > 0, or ratio < 1 - low and A < 0. Any equal shapes -> bool."""
    return ((advantages > 0) & (ratio > 1.0 + high)) | ((advantages < 0) & (ratio < 1.0 - low))


@register_policy_loss("ppo", zero_without_advantage=True, reads=(*CLIP, "clip_ratio_c"))
def _ppo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    low, high = clip_range(config, 0.2, 0.2)
    ratio = inputs.log_ratio.exp()
    output = clipped_surrogate(ratio, inputs.advantages, inputs.mask, low, high, config.clip_ratio_c)
    if config.clip_ratio_c is not None:
        is_dual_clipped = (inputs.advantages < 0) & (ratio > config.clip_ratio_c)
        output.metrics["pg_clipfrac_lower"] = token_sum(is_dual_clipped, inputs.mask)
    return output


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, dual_clip: float | None = None
) -> PolicyLossOutput:
    """Compute PPO's clipped loss and the clip fractions. ratio, advantages: [B, L], or [B] per row; mask: [B, L]."""
    metrics = compute_clip_metrics(is_clipped(ratio, advantages, low, high), ratio > 1, mask)
    return PolicyLossOutput(ppo_clip(ratio, advantages, low, high, dual_clip), metrics)


def old_policy_penalty(log_ratio: Tensor) -> Tensor:
    """Estimate KL(old||pi) at each token by k3: r - 1 - log r, with r = pi / old. Any shape.

    Over tokens that the old policy samples, the means of value and gradient are those of the KL.
    """
    return kl_penalty(-log_ratio, torch.zeros_like(log_ratio), "k3")


@register_policy_loss("ppo_kl", reads=("policy_loss.ppo_kl_coef",))
def _ppo_kl(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute PPO's penalized loss -r A + beta KL(old||pi) (arXiv 1707.06347, Eq. 8)."""
    coef = config.policy_loss.ppo_kl_coef if inputs.kl_coef is None else inputs.kl_coef
    d = inputs.log_ratio
    metrics = {"policy_kl_coef": token_sum(torch.full_like(d, coef), inputs.mask)}
    return PolicyLossOutput(-d.exp() * inputs.advantages, metrics, coef * old_policy_penalty(d))


@register_policy_loss("surrogate", zero_without_advantage=True, is_surrogate=True, reads=())
def _surrogate(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the loss -r A, the negative of TRPO's surrogate objective (arXiv 1502.05477, Eq. 14)."""
    return PolicyLossOutput(-inputs.log_ratio.exp() * inputs.advantages)


def cispo(
    logp: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    mask_low: float | None,
    mask_high: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute the CISPO loss -sg[clip(r, 1 - low, 1 + high)] A log pi (arXiv 2506.13585, Eq. 4-5). All [B, L].

    low=inf means no lower bound. With mask_low and mask_high, tokens with A > 0 and r > 1 + mask_high, or A < 0 and
    r < 1 - mask_low, have loss 0 but still count in the denominator (Eq. 6-7). Returns the loss and a bool matrix that
    is True where the weight is clipped or the loss is set to 0.
    """
    ratio = ratio.detach()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    mask_low, mask_high = (math.inf if radius is None else radius for radius in (mask_low, mask_high))
    dropped = is_clipped(ratio, advantages, mask_low, mask_high)
    loss = torch.where(dropped, torch.zeros_like(logp), -weight * advantages * logp)
    return loss, dropped | (weight != ratio)


@register_policy_loss(
    "cispo", zero_without_advantage=True, reads=(*CLIP, "policy_loss.cispo_mask_low", "policy_loss.cispo_mask_high")
)
def _cispo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the CISPO loss. By default the importance weight has no lower bound and the upper bound 1.28."""
    low, high = clip_range(config, math.inf, 0.28)
    mask_low, mask_high = config.policy_loss.cispo_mask_low, config.policy_loss.cispo_mask_high
    ratio = inputs.log_ratio.detach().exp()
    loss, clipped = cispo(inputs.logp, ratio, inputs.advantages, low, high, mask_low, mask_high)
    return PolicyLossOutput(loss, compute_clip_metrics(clipped, ratio > 1, inputs.mask))


def sapo(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """Compute the SAPO loss -(4/tau) sigmoid(tau (r - 1)) A (arXiv 2511.20347, Eq. 5-6). Any equal shapes.

    tau is tau_pos where A > 0, else tau_neg. The gradient has weight 1 at ratio r = 1 and decreases on both sides.
    """
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages


@register_policy_loss("sapo", zero_without_advantage=True, reads=("tau_pos", "tau_neg"))
def _sapo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    ratio = inputs.log_ratio.exp()
    return PolicyLossOutput(sapo(ratio, inputs.advantages, config.tau_pos, config.tau_neg))


def policy_gradient(logp: Tensor, advantages: Tensor) -> Tensor:
    """Compute the REINFORCE loss -A log pi. Any equal shapes."""
    return -advantages * logp


# GPG's factor alpha is part of the advantages (gpg_alpha), so its loss is that of REINFORCE.
@register_policy_loss("gpg", zero_without_advantage=True, on_policy=True, reads=())
@register_policy_loss("reinforce", zero_without_advantage=True, on_policy=True, reads=())
def _reinforce(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    return PolicyLossOutput(policy_gradient(inputs.logp, inputs.advantages))


def binary_tv(logp: Tensor, rollout_logp: Tensor) -> Tensor:
    """Compute |mu - pi|, the total variation between "this token" and "any other" (arXiv 2602.04879, Eq. 13).

    pi: trained policy, mu: rollout engine. Any equal shapes.
    """
    return (logp.exp() - rollout_logp.exp()).abs()


def binary_kl(logp: Tensor, rollout_logp: Tensor) -> Tensor:
    """Compute KL(mu||pi) between "this token" and "any other", in nats (arXiv 2602.04879, Eq. 14). Any equal shapes.

    Infinite if pi = 1 > mu.
    """
    other_pi, other_mu = (-torch.expm1(token_logp.clamp(max=0.0)) for token_logp in (logp, rollout_logp))
    kl_of_others = torch.xlogy(other_mu, other_mu) - torch.xlogy(other_mu, other_pi)
    return rollout_logp.exp() * (rollout_logp - logp) + kl_of_others


def is_dropped(log_ratio: Tensor, divergence: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where DPPO drops a token (arXiv 2602.04879, Eq. 12). Any equal shapes -> bool.

    A token is dropped if the update moves it away from the engine's policy (A > 0 and ratio > 1, or A < 0 and
    ratio < 1), and its divergence exceeds `high` or `low`, respectively.
    """
    too_high = (advantages > 0) & (log_ratio > 0) & (divergence > high)
    return too_high | ((advantages < 0) & (log_ratio < 0) & (divergence > low))


def dppo(logp: Tensor, log_ratio: Tensor, advantages: Tensor, dropped: Tensor, cap: float = math.inf) -> Tensor:
    """Compute the DPPO loss -sg[min(r, cap)] A, with gradient through log pi; 0 where dropped. All [B, L].

    arXiv 2602.04879, Eq. 12, and Eq. 23 for the cap. Without a cap, value and gradient are those of -r A.
    """
    weight = log_ratio.detach().exp().clamp(max=cap)
    loss = -weight * advantages * (1.0 + logp - logp.detach())
    return torch.where(dropped, torch.zeros_like(loss), loss)


def _register_dppo(name: str, divergence: Callable[[Tensor, Tensor], Tensor], default: float) -> None:
    """Register the DPPO loss with bounds of this divergence. default: default of both bounds (section 5 of the paper).

    inputs.old_logp are the engine's log-probs, because the loss has anchor="rollout".
    """

    @register_policy_loss(name, zero_without_advantage=True, anchor="rollout", reads=(*CLIP, "clip_ratio_c"))
    def compute_loss(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
        d, logp = inputs.log_ratio.detach(), inputs.logp.detach()
        bounds = clip_range(config, default, default)
        dropped = is_dropped(d, divergence(logp, inputs.old_logp), inputs.advantages, *bounds)
        loss = dppo(inputs.logp, d, inputs.advantages, dropped, config.clip_ratio_c or math.inf)
        return PolicyLossOutput(loss, compute_clip_metrics(dropped, d > 0, inputs.mask))


_register_dppo("dppo_tv", binary_tv, 0.2)
_register_dppo("dppo_kl", binary_kl, 0.05)


def token_covariance(logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute each token's term of the covariance of advantage and log-prob; 0 outside the mask. [B, L] -> [B, L]."""
    logp = logp.detach()
    return apply_mask((advantages - masked_mean(advantages, mask)) * (logp - masked_mean(logp, mask)), mask)


def find_clip_cov_candidates(
    covariance: Tensor, clipped: Tensor, mask: Tensor, share: float, low: float, high: float
) -> tuple[Tensor, int]:
    """Return the tokens from which Clip-Cov draws (bool [B, L]), and how many of them it draws. Tensors: [B, L].

    The candidates are the tokens with low < covariance < high that PPO has not clipped. Clip-Cov draws
    `share` times the number of tokens in the mask, at least one token, and at most all candidates.
    """
    candidates = (covariance > low) & (covariance < high) & ~clipped & mask.bool()
    return candidates, min(_count_selected_tokens(share, mask), int(candidates.sum()))


def top_covariance_tokens(covariance: Tensor, mask: Tensor, share: float) -> Tensor:
    """Select the given share of tokens (at least one) with the largest covariance. [B, L] each -> bool [B, L]."""
    positions = mask.bool().flatten().nonzero().squeeze(1)
    order = covariance.flatten()[positions].argsort(descending=True, stable=True)[: _count_selected_tokens(share, mask)]
    top = torch.zeros_like(mask, dtype=torch.bool).flatten()
    top[positions[order]] = True
    return top.view_as(mask)


def kl_cov_penalty(log_ratio: Tensor, selected: Tensor, coef: float) -> Tensor:
    """Compute KL-Cov's penalty: coef * |log_ratio| on the selected tokens, else 0. All [B, L]."""
    return torch.where(selected, coef * log_ratio.abs(), torch.zeros_like(log_ratio))


def _count_selected_tokens(share: float, mask: Tensor) -> int:
    return max(1, int(share * int(mask.bool().sum())))


def _select_clipped_tokens(logp: Tensor, advantages: Tensor, config: Actor) -> Tensor:
    """Select the tokens whose loss Clip-Cov sets to 0. The n tokens are in random order, so that the first candidates
    are a random draw. [n] each -> bool [n]."""
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
    bounds = clip_range(config, 0.2, 0.2)
    output = clipped_surrogate(inputs.log_ratio.exp(), inputs.advantages, inputs.mask, *bounds)
    output.metrics["clip_cov_fraction"] = token_sum(inputs.selected_tokens, inputs.mask)
    return replace(output, loss=apply_mask(output.loss, ~inputs.selected_tokens))


def _select_top_covariance_tokens(logp: Tensor, advantages: Tensor, config: Actor) -> Tensor:
    """Select the tokens with the largest covariance, on which KL-Cov adds a KL penalty. [n] each -> bool [n]."""
    mask = torch.ones_like(logp)
    return top_covariance_tokens(token_covariance(logp, advantages, mask), mask, config.policy_loss.kl_cov_ratio)


@register_policy_loss(
    "kl_cov", reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"), select_tokens=_select_top_covariance_tokens
)
def _kl_cov(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    assert inputs.selected_tokens is not None
    d = inputs.log_ratio
    penalty = kl_cov_penalty(d, inputs.selected_tokens, config.policy_loss.ppo_kl_coef)
    metrics = {"kl_cov_fraction": token_sum(inputs.selected_tokens, inputs.mask)}
    return PolicyLossOutput(-d.exp() * inputs.advantages, metrics, penalty)
