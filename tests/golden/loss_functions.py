"""Losses, KL and weights under the names and parameters of the vectors files.

`logp_sg`, where given, stands in for the stop-gradient copies of logp; a function without such copies ignores it.
Guards against huge log-ratios are off unless a file asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alphaapollo.algorithms import correction, kl, preference
from alphaapollo.algorithms.aggregation import aggregate_sequences, sequence_weights
from alphaapollo.algorithms.entropy import entropy
from alphaapollo.algorithms.log_ratio import cut, log_ratio
from alphaapollo.algorithms.masked import masked, masked_mean
from alphaapollo.algorithms.policy_losses import covariance, gspo, ppo, reinforce
from alphaapollo.algorithms.policy_losses.cispo import cispo as cispo_loss
from alphaapollo.algorithms.policy_losses.gmpo import gmpo_ratio
from alphaapollo.algorithms.policy_losses.sapo import sapo as sapo_loss
from alphaapollo.algorithms.value_loss import value_loss as value_loss_per_token
from tests.golden.common import (
    Function,
    Results,
    UnsupportedError,
    aggregated,
    choose,
    sequential,
    token_weights,
)

AggKw = dict[str, Any] | None


def policy_term(
    loss: Tensor, mask: Tensor, agg: str, is_weights: Tensor | None, agg_kw: AggKw, clipped: Tensor | None = None
) -> Results:
    weighted = masked(loss if is_weights is None else loss * is_weights, mask)
    results = {"loss": aggregated(weighted, mask, agg, agg_kw), "token_loss": weighted}
    return results if clipped is None else {**results, "clipfrac": masked_mean(clipped.to(loss.dtype), mask)}


def row_term(loss: Tensor, mask: Tensor, count: str, ratio: Tensor, clipped: Tensor | None = None) -> Results:
    choose("count", count, ("nonempty", "all"))
    weights = sequence_weights(mask.sum(dim=1), count)
    results = {"loss": aggregate_sequences(loss, weights), "ratio": ratio}
    if clipped is None:
        return results
    return {**results, "clipfrac": masked_mean(clipped.to(loss.dtype), mask.bool().any(dim=1))}


def aggregate(loss_mat: Tensor, mask: Tensor, mode: str, **kw: Any) -> Results:
    weights = token_weights(mask, mode, **kw)
    return {"loss": aggregated(loss_mat, mask, mode, kw), "weights": weights.unsqueeze(1) * mask}


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    agg: str = "token-mean",
    is_weights: Tensor | None = None,
    log_clamp: float | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = log_ratio(logp, old_logp, mask, log_clamp).exp()
    loss = ppo.ppo_clip(ratio, adv, eps_low, eps_high, dual_clip)
    return policy_term(loss, mask, agg, is_weights, agg_kw, ppo.is_clipped(ratio, adv, eps_low, eps_high))


def policy_gradient(
    logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    agg: str = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
) -> Results:
    return policy_term(reinforce.policy_gradient(logp, adv), mask, agg, is_weights, agg_kw)


def gspo_sequence(
    logp: Tensor,
    old_logp: Tensor,
    seq_adv: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    count: str = "nonempty",
) -> Results:
    ratio = gspo.geometric_ratio(logp, old_logp, mask, limit=None)
    loss = ppo.ppo_clip(ratio, seq_adv, eps_low, eps_high)
    return row_term(loss, mask, count, ratio, ppo.is_clipped(ratio, seq_adv, eps_low, eps_high))


def sequence_ppo(
    logp: Tensor,
    old_logp: Tensor,
    seq_adv: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    count: str = "nonempty",
) -> Results:
    ratio = gspo.product_ratio(logp, old_logp, mask, limit=None)
    loss = ppo.ppo_clip(ratio, seq_adv, eps_low, eps_high)
    return row_term(loss, mask, count, ratio, ppo.is_clipped(ratio, seq_adv, eps_low, eps_high))


def gmpo(
    logp: Tensor,
    old_logp: Tensor,
    seq_adv: Tensor,
    mask: Tensor,
    log_eps_low: float = 0.4,
    log_eps_high: float = 0.4,
    count: str = "nonempty",
) -> Results:
    ratio, _ = gmpo_ratio(logp, old_logp, seq_adv, mask, log_eps_low, log_eps_high, limit=None)
    return row_term(-seq_adv * ratio, mask, count, ratio)


def gspo_token(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    agg: str = "seq-mean-token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = gspo.gspo_token_ratio(logp, old_logp, mask, logp_sg, limit=None)
    loss = ppo.ppo_clip(ratio, adv, eps_low, eps_high)
    return policy_term(loss, mask, agg, is_weights, agg_kw, ppo.is_clipped(ratio, adv, eps_low, eps_high))


def cispo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float | None = None,
    eps_high: float = 0.28,
    agg: str = "token-mean",
    mask_eps_low: float | None = None,
    mask_eps_high: float | None = None,
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = log_ratio(logp if logp_sg is None else logp_sg, old_logp, mask, limit=None).exp()
    loss, clipped = cispo_loss(logp, ratio, adv, eps_low, eps_high, mask_eps_low, mask_eps_high)
    return policy_term(loss, mask, agg, is_weights, agg_kw, clipped)


def sapo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    agg: str = "seq-mean-token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    ratio = log_ratio(logp, old_logp, mask, limit=None).exp()
    return policy_term(sapo_loss(ratio, adv, tau_pos, tau_neg), mask, agg, is_weights, agg_kw)


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
    cov = covariance.token_covariance(logp, adv, mask)
    clipped = ppo.is_clipped(log_ratio(logp, old_logp, mask, limit=None).exp(), adv, eps_low, eps_high)
    candidates, count = covariance.clip_cov_candidates(cov, clipped, mask, ratio, low, high)
    return {"candidates": candidates.nonzero().tolist(), "num_selected": count, "cov": cov}


def clip_cov(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    selected: Sequence[Sequence[int]],
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    agg: str = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
) -> Results:
    drawn = torch.zeros(mask.shape, dtype=torch.bool)
    for row, position in selected:
        drawn[row, position] = True
    ratio = log_ratio(logp, old_logp, mask, limit=None).exp()
    return policy_term(masked(ppo.ppo_clip(ratio, adv, eps_low, eps_high), ~drawn), mask, agg, is_weights, agg_kw)


def kl_cov(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    ratio: float = 2e-4,
    coef: float = 1.0,
    agg: str = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    cov = covariance.token_covariance(logp if logp_sg is None else logp_sg, adv, mask)
    selected = covariance.top_covariance(cov, mask, ratio)
    loss = covariance.kl_cov(log_ratio(logp, old_logp, mask, limit=None), adv, selected, coef)
    return {**policy_term(loss, mask, agg, is_weights, agg_kw), "selected": selected.nonzero().tolist()}


def kl_loss(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    kind: str = "k3",
    agg: str = "token-mean",
    coef: float = 1.0,
    logp_sg: Tensor | None = None,
    log_clamp: float | None = None,
    value_clamp: float | None = None,
    agg_kw: AggKw = None,
) -> Results:
    """With kind `full`, logp and ref_logp are logits [B, L, V]."""
    token_kl = masked(kl_per_token(logp, ref_logp, kind, logp_sg, log_clamp, value_clamp), mask)
    return {"loss": coef * aggregated(token_kl, mask, agg, agg_kw), "token_kl": token_kl}


def kl_per_token(
    logp: Tensor,
    ref_logp: Tensor,
    kind: str,
    logp_sg: Tensor | None = None,
    log_clamp: float | None = None,
    value_clamp: float | None = None,
) -> Tensor:
    if kind == "full":
        return cut(kl.kl_full(logp, ref_logp), value_clamp)
    name = kind.removesuffix("+")
    choose("kind", name, tuple(kl.ESTIMATORS))
    held = logp.detach() if logp_sg is None else logp_sg
    d = (held if kind.endswith("+") else logp) - ref_logp
    value = cut(kl.estimate(cut(d, log_clamp), name, limit=None), value_clamp)
    if not kind.endswith("+"):
        return value
    return kl.estimate(logp - ref_logp, "k2") - kl.estimate(held - ref_logp, "k2") + value


def grpo_total(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta: float = 0.0,
    kl_kind: str = "k3",
    dual_clip: float | None = None,
    agg: str = "token-mean",
    is_weights: Tensor | None = None,
    agg_kw: AggKw = None,
    logp_sg: Tensor | None = None,
) -> Results:
    policy = ppo_clip(
        logp, old_logp, adv, mask, eps_low, eps_high, dual_clip, agg, is_weights, agg_kw=agg_kw, logp_sg=logp_sg
    )
    divergence = kl_loss(logp, ref_logp, mask, kl_kind, agg, beta, logp_sg, agg_kw=agg_kw)
    return {**policy, "loss": policy["loss"] + divergence["loss"]}


def kl_full(logits: Tensor, ref_logits: Tensor) -> Results:
    return {"value": kl.kl_full(logits, ref_logits)}


def entropy_loss(
    logits: Tensor, mask: Tensor, coef: float = 1.0, agg: str = "token-mean", agg_kw: AggKw = None
) -> Results:
    per_token = masked(entropy(logits), mask)
    return {"loss": -coef * aggregated(per_token, mask, agg, agg_kw), "entropy": per_token}


def value_loss(
    vpreds: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = 0.2,
    agg: str = "token-mean",
    agg_kw: AggKw = None,
) -> Results:
    loss, clipped = value_loss_per_token(vpreds, old_values, returns, mask, clip)
    return policy_term(loss, mask, agg, None, agg_kw, clipped)


def mismatch_weights(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    method: str = "tis",
    level: str = "token",
    low: float | None = None,
    high: float | None = 2.0,
    batch_normalise: bool = False,
    log_clamp: float | None = 20.0,
) -> Results:
    choose("method", method, ("tis", "mask"))
    choose("level", level, ("token", "sequence", "geometric"))
    weights = correction.mismatch_weights(
        train_logp,
        rollout_logp,
        mask,
        method=method,
        level=level,
        low=low,
        high=high,
        batch_normalise=batch_normalise,
        limit=log_clamp,
    )
    return {"value": weights}


def kl_fixed(coef: float, kls: Sequence[float], n_steps: int | None = None) -> Results:
    return _controlled(kl.FixedKL(coef), kls, n_steps or 1)


def kl_adaptive(coef: float, target: float, horizon: float, kls: Sequence[float], n_steps: int) -> Results:
    return _controlled(kl.AdaptiveKL(coef, target, horizon), kls, n_steps)


def kl_ppo2017(coef: float, target: float, kls: Sequence[float]) -> Results:
    return _controlled(kl.DoublingKL(coef, target), kls, 1)


def kl_dual_descent(lam: float, alpha: float, delta: float, kls: Sequence[float]) -> Results:
    return _controlled(kl.DualKL(lam, delta, alpha), kls, 1)


def _controlled(controller: kl.KLController, kls: Sequence[float], n_steps: int) -> Results:
    def step(measured: float) -> float:
        controller.update(measured, n_steps)
        return controller.coef

    return sequential(step, kls)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_len: Tensor | None = None,
    rejected_len: Tensor | None = None,
    slic_delta: float = 1.0,
) -> Results:
    u, v = chosen - ref_chosen, rejected - ref_rejected
    if loss_type == "ipo_avg":
        if chosen_len is None or rejected_len is None:
            raise UnsupportedError("ipo_avg without chosen_len and rejected_len")
        pair_loss = preference.ipo(u / chosen_len - v / rejected_len, beta)
    else:
        forms = {
            "sigmoid": lambda: preference.dpo(u - v, beta, label_smoothing),
            "robust": lambda: preference.robust_dpo(u - v, beta, label_smoothing),
            "ipo": lambda: preference.ipo(u - v, beta),
            "hinge": lambda: preference.hinge(u - v, beta),
            "slic": lambda: preference.slic(chosen, rejected, slic_delta),
            "exo_pair": lambda: preference.exo_pair(u - v, beta, label_smoothing or 1e-3),
            "nca_pair": lambda: preference.nca_pair(u, v, beta),
            "sppo_hard": lambda: preference.sppo_hard(u, v, beta),
            "apo_zero": lambda: preference.apo_zero(u, v, beta),
            "apo_down": lambda: preference.apo_down(u, v, beta),
        }
        choose("loss_type", loss_type, (*forms, "ipo_avg"))
        pair_loss = forms[loss_type]()
    return {
        "loss": pair_loss.mean(),
        "pair_loss": pair_loss,
        "reward_chosen": beta * u,
        "reward_rejected": beta * v,
    }


FUNCTIONS: dict[str, Function] = {
    function.__name__: function
    for function in (
        aggregate,
        ppo_clip,
        policy_gradient,
        gspo_sequence,
        sequence_ppo,
        gmpo,
        gspo_token,
        cispo,
        sapo,
        clip_cov_candidates,
        clip_cov,
        kl_cov,
        kl_loss,
        grpo_total,
        kl_full,
        entropy_loss,
        value_loss,
        mismatch_weights,
        kl_fixed,
        kl_adaptive,
        kl_ppo2017,
        kl_dual_descent,
        dpo,
    )
}
