"""KL, entropy, correction weights and preference losses with the names and parameters of the vectors
files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms import adaptive_coefficients, kl, mismatch
from alphaapollo.algorithms.kl import REVERSE
from alphaapollo.algorithms.preference_losses import AnswerBatch, get_preference_loss
from alphaapollo.algorithms.statistics import MAX_LOG_RATIO, apply_mask, masked_mean, row_mean
from alphaapollo.config.schema import KLControl, Preference
from alphaapollo.models.lm_head import DivergenceTarget
from tests.golden.common import (
    TOKEN_MEAN,
    Results,
    UnsupportedError,
    clamped,
    head_divergence,
    head_input,
    head_stats,
)

Kind = Literal[
    "k1", "abs", "k2", "k3", "full", "kl", "mse", "low_var_kl",
    "k1+", "abs+", "k2+", "k3+", "kl+", "mse+", "low_var_kl+",
]  # fmt: skip
PairLoss = Literal[
    "sigmoid", "robust", "ipo", "ipo_avg", "hinge", "slic", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down"
]


def kl_loss(
    logp,
    ref_logp,
    mask,
    kind: Kind = "k3",
    agg=TOKEN_MEAN,
    coef=1.0,
    logp_sg=None,
    log_clamp=None,
    value_clamp=None,
) -> Results:
    """With kind `full`, logp and ref_logp are logits [B, L, V]."""
    token_kl = apply_mask(kl_per_token(logp, ref_logp, kind, logp_sg, log_clamp, value_clamp), mask)
    return {"loss": coef * agg.sum(token_kl, mask), "token_kl": token_kl}


def kl_per_token(logp, ref_logp, kind: Kind, logp_sg=None, log_clamp=None, value_clamp=None) -> Tensor:
    if kind == "full":
        return clamped(kl_full(logp, ref_logp)["value"], value_clamp)
    held = logp.detach() if logp_sg is None else logp_sg
    d = (held if kind.endswith("+") else logp) - ref_logp
    value = clamped(kl.kl_penalty(clamped(d, log_clamp), torch.zeros_like(d), kind.removesuffix("+")), value_clamp)
    if not kind.endswith("+"):
        return value
    return kl.kl_penalty(logp, ref_logp, "k2") - kl.kl_penalty(held, ref_logp, "k2") + value


def kl_full(logits, ref_logits) -> Results:
    return {"value": head_divergence(logits, DivergenceTarget(head_input(ref_logits), REVERSE))}


def entropy_loss(logits, mask, coef=1.0, agg=TOKEN_MEAN) -> Results:
    entropy = head_stats(logits, needs_entropy=True).entropy
    assert entropy is not None
    per_token = apply_mask(entropy.view(mask.shape), mask)
    return {"loss": -coef * agg.sum(per_token, mask), "entropy": per_token}


def mismatch_weights(
    train_logp,
    rollout_logp,
    mask,
    method: mismatch.Method = "tis",
    level: mismatch.Level = "token",
    low=None,
    high=2.0,
    batch_normalise=False,
    log_clamp=MAX_LOG_RATIO,
) -> Results:
    """`batch_normalise`, which the project does not offer, divides by the mean weight of tokens or non-empty rows."""
    if log_clamp != MAX_LOG_RATIO:
        raise UnsupportedError(f"log_clamp={log_clamp}; the project clamps at {MAX_LOG_RATIO}")
    options = {"method": method, "level": level, "low": low, "high": high}
    weights = mismatch.rollout_correction_weights(train_logp, rollout_logp, mask, **options)
    if not batch_normalise:
        return {"value": weights}
    mean = masked_mean(weights, mask)
    if level != "token":
        mean = masked_mean(row_mean(weights, mask), mask.bool().any(dim=1))
    return {"value": weights / mean if mean > 0 else weights}


def kl_fixed(coef, kls, n_steps=None) -> Results:
    return {
        "value": [adaptive_coefficients.next_kl_coef(KLControl(kl_coef=coef), coef, measured, 1) for measured in kls]
    }


def kl_adaptive(coef, target, horizon, kls, n_steps) -> Results:
    config = KLControl(type="adaptive", target_kl=target, horizon=horizon)
    return _series(
        lambda coef, measured: adaptive_coefficients.next_kl_coef(config, coef, measured, n_steps), coef, kls
    )


def kl_ppo2017(coef, target, kls) -> Results:
    config = KLControl(type="doubling", target_kl=target)
    return _series(lambda coef, measured: adaptive_coefficients.next_kl_coef(config, coef, measured, 1), coef, kls)


def kl_dual_descent(lam, alpha, delta, kls) -> Results:
    return _series(
        lambda coef, measured: adaptive_coefficients.next_kl_coef_by_dual_ascent(coef, measured, delta, alpha), lam, kls
    )


def _series(update: Callable[[float, float], float], coef: float, kls: Sequence[float]) -> Results:
    """The coefficient after each of a series of KL measurements."""
    coefs = []
    for measured in kls:
        coef = update(coef, measured)
        coefs.append(coef)
    return {"value": coefs}


def dpo(
    chosen,
    rejected,
    ref_chosen,
    ref_rejected,
    beta=0.1,
    loss_type: PairLoss = "sigmoid",
    label_smoothing=0.0,
    chosen_len=None,
    rejected_len=None,
    slic_delta=1.0,
) -> Results:
    lengths = torch.ones_like(chosen) if chosen_len is None else chosen_len
    answers = AnswerBatch(
        logp=interleaved(chosen, rejected),
        lengths=interleaved(lengths, lengths if rejected_len is None else rejected_len),
        is_desirable=torch.tensor([True, False] * len(chosen)),
        ref_logp=interleaved(ref_chosen, ref_rejected),
    )
    smoothing = label_smoothing or None  # null is the default of the loss
    config = Preference(beta=beta, label_smoothing=smoothing, slic_delta=slic_delta)
    loss = get_preference_loss("ipo_mean" if loss_type == "ipo_avg" else loss_type)
    pair_loss = loss.fn(answers, beta, config)
    rewards = {"reward_chosen": beta * (chosen - ref_chosen), "reward_rejected": beta * (rejected - ref_rejected)}
    return {"loss": pair_loss.mean(), "pair_loss": pair_loss, **rewards}


def interleaved(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Alternate chosen and rejected answers. [P] each -> [2 P]"""
    return torch.stack([chosen, rejected], dim=1).flatten()
