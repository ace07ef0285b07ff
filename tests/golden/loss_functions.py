"""Policy and value losses with the names and parameters of the vectors files.

`logp_sg` replaces the stop-gradient copies of logp; functions without such copies ignore it. The clamp of token
log-ratios is off unless a file sets it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alphaapollo.algorithms.aggregation import aggregate_sequence_losses
from alphaapollo.algorithms.aggregation import value_loss as value_loss_per_token
from alphaapollo.algorithms.policy_losses import gspo, ppo
from alphaapollo.algorithms.policy_losses.gspo import gmpo_ratio
from alphaapollo.algorithms.policy_losses.ppo import cispo as cispo_loss
from alphaapollo.algorithms.policy_losses.ppo import sapo as sapo_loss
from alphaapollo.algorithms.statistics import apply_mask, masked_mean
from alphaapollo.config.schema import AggregationMode
from tests.golden.common import AggKw, Count, Results, aggregated, counted_weights, log_ratio, token_weights
from tests.golden.other_functions import Kind, kl_loss


def _policy_term(
    loss: Tensor,
    mask: Tensor,
    agg: AggregationMode,
    is_weights: Tensor | None,
    agg_kw: AggKw,
    clipped: Tensor | None = None,
) -> Results:
    weighted = apply_mask(loss if is_weights is None else loss * is_weights, mask)
    results = {"loss": aggregated(weighted, mask, agg, agg_kw), "token_loss": weighted}
    return results if clipped is None else {**results, "clipfrac": masked_mean(clipped.to(loss.dtype), mask)}


def _row_term(loss: Tensor, mask: Tensor, count: Count, ratio: Tensor, clipped: Tensor | None = None) -> Results:
    lengths = mask.sum(dim=1)
    weights = counted_weights(lengths, torch.zeros_like(lengths), "seq-mean-token-sum", 1.0, count)
    results = {"loss": aggregate_sequence_losses(loss, weights), "ratio": ratio}
    if clipped is None:
        return results
    return {**results, "clipfrac": masked_mean(clipped.to(loss.dtype), mask.bool().any(dim=1))}


def aggregate(loss_mat: Tensor, mask: Tensor, mode: AggregationMode, **kw: Any) -> Results:
    loss = aggregated(loss_mat, mask, mode, kw)
    return {"loss": loss, "weights": token_weights(mask, mode, **kw).unsqueeze(1) * mask}


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    agg: AggregationMode = "token-mean",
    is_weights: Tensor | None = None,
    log_clamp: float | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = log_ratio(logp, old_logp, mask, log_clamp).exp()
    loss = ppo.ppo_clip(ratio, adv, eps_low, eps_high, dual_clip)
    return _policy_term(loss, mask, agg, is_weights, agg_kw, ppo.is_clipped(ratio, adv, eps_low, eps_high))


def policy_gradient(
    logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    agg: AggregationMode = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
) -> Results:
    return _policy_term(ppo.policy_gradient(logp, adv), mask, agg, is_weights, agg_kw)


def gspo_sequence(
    logp: Tensor,
    old_logp: Tensor,
    seq_adv: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    count: Count = "nonempty",
) -> Results:
    ratio = gspo.geometric_ratio(logp, old_logp, mask)
    loss = ppo.ppo_clip(ratio, seq_adv, eps_low, eps_high)
    return _row_term(loss, mask, count, ratio, ppo.is_clipped(ratio, seq_adv, eps_low, eps_high))


def sequence_ppo(
    logp: Tensor,
    old_logp: Tensor,
    seq_adv: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    count: Count = "nonempty",
) -> Results:
    ratio = gspo.product_ratio(logp, old_logp, mask)
    loss = ppo.ppo_clip(ratio, seq_adv, eps_low, eps_high)
    return _row_term(loss, mask, count, ratio, ppo.is_clipped(ratio, seq_adv, eps_low, eps_high))


def gmpo(
    logp: Tensor,
    old_logp: Tensor,
    seq_adv: Tensor,
    mask: Tensor,
    log_eps_low: float = 0.4,
    log_eps_high: float = 0.4,
    count: Count = "nonempty",
) -> Results:
    ratio, _ = gmpo_ratio(logp, old_logp, seq_adv, mask, log_eps_low, log_eps_high)
    return _row_term(-seq_adv * ratio, mask, count, ratio)


def gspo_token(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    agg: AggregationMode = "seq-mean-token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = gspo.gspo_token_ratio(logp, old_logp, mask, logp_sg)
    loss = ppo.ppo_clip(ratio, adv, eps_low, eps_high)
    return _policy_term(loss, mask, agg, is_weights, agg_kw, ppo.is_clipped(ratio, adv, eps_low, eps_high))


def cispo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float | None = None,
    eps_high: float = 0.28,
    agg: AggregationMode = "token-mean",
    mask_eps_low: float | None = None,
    mask_eps_high: float | None = None,
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = log_ratio(logp if logp_sg is None else logp_sg, old_logp, mask).exp()
    low = math.inf if eps_low is None else eps_low
    loss, clipped = cispo_loss(logp, ratio, adv, low, eps_high, mask_eps_low, mask_eps_high)
    return _policy_term(loss, mask, agg, is_weights, agg_kw, clipped)


def sapo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    agg: AggregationMode = "seq-mean-token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = log_ratio(logp, old_logp, mask).exp()
    return _policy_term(sapo_loss(ratio, adv, tau_pos, tau_neg), mask, agg, is_weights, agg_kw)


def clip_cov_candidates(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Results:
    cov = ppo.token_covariance(logp, adv, mask)
    clipped = ppo.is_clipped(log_ratio(logp, old_logp, mask).exp(), adv, eps_low, eps_high)
    candidates, count = ppo.find_clip_cov_candidates(cov, clipped, mask, ratio, low, high)
    return {"candidates": candidates.nonzero().tolist(), "num_selected": count, "cov": cov}


def clip_cov(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    selected: Sequence[Sequence[int]],
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    agg: AggregationMode = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
) -> Results:
    drawn = torch.zeros(mask.shape, dtype=torch.bool)
    for row, position in selected:
        drawn[row, position] = True
    ratio = log_ratio(logp, old_logp, mask).exp()
    return _policy_term(apply_mask(ppo.ppo_clip(ratio, adv, eps_low, eps_high), ~drawn), mask, agg, is_weights, agg_kw)


def kl_cov(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    ratio: float = 2e-4,
    coef: float = 1.0,
    agg: AggregationMode = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    cov = ppo.token_covariance(logp if logp_sg is None else logp_sg, adv, mask)
    selected = ppo.top_covariance_tokens(cov, mask, ratio)
    loss = ppo.kl_cov(log_ratio(logp, old_logp, mask), adv, selected, coef)
    return {**_policy_term(loss, mask, agg, is_weights, agg_kw), "selected": selected.nonzero().tolist()}


def grpo_total(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta: float = 0.0,
    kl_kind: Kind = "k3",
    dual_clip: float | None = None,
    agg: AggregationMode = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    policy = ppo_clip(
        logp, old_logp, adv, mask, eps_low, eps_high, dual_clip, agg, is_weights, agg_kw=agg_kw, logp_sg=logp_sg
    )
    divergence = kl_loss(logp, ref_logp, mask, kl_kind, agg, beta, logp_sg, agg_kw=agg_kw)
    return {**policy, "loss": policy["loss"] + divergence["loss"]}


def value_loss(
    vpreds: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = 0.2,
    agg: AggregationMode = "token-mean",
    agg_kw: AggKw = None,
) -> Results:
    loss, clipped = value_loss_per_token(vpreds, old_values, returns, mask, clip)
    return _policy_term(loss, mask, agg, None, agg_kw, clipped)
