"""Policy and value losses with the names and parameters of the vectors files.

`logp_sg` replaces the stop-gradient copies of logp; functions without such copies ignore it. The clamp of token
log-ratios is off unless a file sets it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alphaapollo.algorithms.aggregation import aggregate_sequence_losses
from alphaapollo.algorithms.policy_losses import gspo, ppo
from alphaapollo.algorithms.statistics import apply_mask, masked_mean
from alphaapollo.algorithms.value_loss import value_loss as value_loss_per_token
from alphaapollo.config.schema import AggregationMode
from tests.golden.common import (
    CORRECTED,
    CORRECTED_SEQUENCE_MEAN,
    TOKEN_MEAN,
    Aggregation,
    Count,
    Results,
    counted_weights,
    log_ratio,
    token_weights,
)
from tests.golden.other_functions import Kind, kl_loss


def _row_loss(loss: Tensor, mask: Tensor, count: Count, ratio: Tensor) -> Results:
    lengths = mask.sum(dim=1)
    weights = counted_weights(lengths, torch.zeros_like(lengths), "seq-mean-token-sum", 1.0, count)
    return {"loss": aggregate_sequence_losses(loss, weights), "ratio": ratio}


def _clipped_row_loss(ratio: Tensor, seq_adv: Tensor, mask: Tensor, low: float, high: float, count: Count) -> Results:
    clipped = ppo.is_clipped(ratio, seq_adv, low, high).to(ratio.dtype)
    results = _row_loss(ppo.ppo_clip(ratio, seq_adv, low, high), mask, count, ratio)
    return {**results, "clipfrac": masked_mean(clipped, mask.bool().any(dim=1))}


def _clipped_loss(ratio: Tensor, adv: Tensor, mask: Tensor, low: float, high: float, agg: Aggregation) -> Results:
    return agg.sum_weighted(ppo.ppo_clip(ratio, adv, low, high), mask, ppo.is_clipped(ratio, adv, low, high))


def aggregate(loss_mat, mask, mode: AggregationMode, **keywords: Any) -> Results:
    loss = Aggregation(mode, keywords=keywords).sum(loss_mat, mask)
    return {"loss": loss, "weights": token_weights(mask, mode, **keywords).unsqueeze(1) * mask}


def ppo_clip(
    logp, old_logp, adv, mask, eps_low=0.2, eps_high=0.2, dual_clip=None, agg=CORRECTED, log_clamp=None, logp_sg=None
) -> Results:
    ratio = log_ratio(logp, old_logp, mask, log_clamp).exp()
    loss = ppo.ppo_clip(ratio, adv, eps_low, eps_high, dual_clip)
    return agg.sum_weighted(loss, mask, ppo.is_clipped(ratio, adv, eps_low, eps_high))


def policy_gradient(logp, adv, mask, agg=CORRECTED) -> Results:
    return agg.sum_weighted(ppo.policy_gradient(logp, adv), mask)


def gspo_sequence(logp, old_logp, seq_adv, mask, eps_low=3e-4, eps_high=4e-4, count: Count = "nonempty") -> Results:
    return _clipped_row_loss(gspo.geometric_ratio(logp, old_logp, mask), seq_adv, mask, eps_low, eps_high, count)


def sequence_ppo(logp, old_logp, seq_adv, mask, eps_low=0.2, eps_high=0.2, count: Count = "nonempty") -> Results:
    return _clipped_row_loss(gspo.product_ratio(logp, old_logp, mask), seq_adv, mask, eps_low, eps_high, count)


def gmpo(logp, old_logp, seq_adv, mask, log_eps_low=0.4, log_eps_high=0.4, count: Count = "nonempty") -> Results:
    ratio, _ = gspo.gmpo_ratio(logp, old_logp, seq_adv, mask, log_eps_low, log_eps_high)
    return _row_loss(-seq_adv * ratio, mask, count, ratio)


def gspo_token(
    logp, old_logp, adv, mask, eps_low=3e-4, eps_high=4e-4, agg=CORRECTED_SEQUENCE_MEAN, logp_sg=None
) -> Results:
    return _clipped_loss(gspo.gspo_token_ratio(logp, old_logp, mask, logp_sg), adv, mask, eps_low, eps_high, agg)


def cispo(
    logp,
    old_logp,
    adv,
    mask,
    eps_low=None,
    eps_high=0.28,
    agg=CORRECTED,
    mask_eps_low=None,
    mask_eps_high=None,
    logp_sg=None,
) -> Results:
    ratio = log_ratio(logp if logp_sg is None else logp_sg, old_logp, mask).exp()
    low = math.inf if eps_low is None else eps_low
    loss, clipped = ppo.cispo(logp, ratio, adv, low, eps_high, mask_eps_low, mask_eps_high)
    return agg.sum_weighted(loss, mask, clipped)


def sapo(logp, old_logp, adv, mask, tau_pos=1.0, tau_neg=1.05, agg=CORRECTED_SEQUENCE_MEAN, logp_sg=None) -> Results:
    return agg.sum_weighted(ppo.sapo(log_ratio(logp, old_logp, mask).exp(), adv, tau_pos, tau_neg), mask)


def clip_cov_candidates(logp, old_logp, adv, mask, ratio=2e-4, low=1.0, high=5.0, eps_low=0.2, eps_high=0.2) -> Results:
    cov = ppo.token_covariance(logp, adv, mask)
    clipped = ppo.is_clipped(log_ratio(logp, old_logp, mask).exp(), adv, eps_low, eps_high)
    candidates, count = ppo.find_clip_cov_candidates(cov, clipped, mask, ratio, low, high)
    return {"candidates": candidates.nonzero().tolist(), "num_selected": count, "cov": cov}


def clip_cov(logp, old_logp, adv, mask, selected, eps_low=0.2, eps_high=0.2, agg=CORRECTED) -> Results:
    drawn = torch.zeros(mask.shape, dtype=torch.bool)
    for row, position in selected:
        drawn[row, position] = True
    ratio = log_ratio(logp, old_logp, mask).exp()
    return agg.sum_weighted(apply_mask(ppo.ppo_clip(ratio, adv, eps_low, eps_high), ~drawn), mask)


def kl_cov(logp, old_logp, adv, mask, ratio=2e-4, coef=1.0, agg=CORRECTED, logp_sg=None) -> Results:
    cov = ppo.token_covariance(logp if logp_sg is None else logp_sg, adv, mask)
    selected = ppo.top_covariance_tokens(cov, mask, ratio)
    d = log_ratio(logp, old_logp, mask)
    loss = -d.exp() * adv + ppo.kl_cov_penalty(d, selected, coef)
    return {**agg.sum_weighted(loss, mask), "selected": selected.nonzero().tolist()}


def grpo_total(
    logp,
    old_logp,
    ref_logp,
    adv,
    mask,
    eps_low=0.2,
    eps_high=0.2,
    beta=0.0,
    kl_kind: Kind = "k3",
    dual_clip=None,
    agg=CORRECTED,
    logp_sg=None,
) -> Results:
    """The KL has no token weights."""
    policy = ppo_clip(logp, old_logp, adv, mask, eps_low, eps_high, dual_clip, agg)
    divergence = kl_loss(logp, ref_logp, mask, kl_kind, replace(agg, weights=None), beta, logp_sg)
    return {**policy, "loss": policy["loss"] + divergence["loss"]}


def value_loss(vpreds, old_values, returns, mask, clip=0.2, agg=TOKEN_MEAN) -> Results:
    loss, clipped = value_loss_per_token(vpreds, old_values, returns, mask, clip)
    return agg.sum_weighted(loss, mask, clipped)
