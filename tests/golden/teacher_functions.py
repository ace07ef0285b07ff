"""Distillation from one or several teachers with the names and parameters of the vectors files."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.kl import REVERSE, compute_target_advantages
from alphaapollo.algorithms.mismatch import rollout_correction_weights
from alphaapollo.algorithms.policy_losses.ppo import policy_gradient
from alphaapollo.algorithms.statistics import apply_mask
from alphaapollo.config.schema import AggregationMode
from alphaapollo.models.lm_head import DivergenceTarget, WeightedModel
from tests.golden.common import AggKw, Results, aggregated, head_divergence, head_input


def teacher_weights(mask: Tensor, num_teachers: int, weights: object, route: Tensor | None) -> Tensor:
    """Weight of each teacher for each token: given, one teacher per row, or the mean. [B, L, D]"""
    if weights is not None:
        return torch.as_tensor(weights, dtype=mask.dtype)
    if route is None:
        return mask.new_full((*mask.shape, num_teachers), 1 / num_teachers)
    chosen = torch.nn.functional.one_hot(route.long(), num_teachers).to(mask.dtype)
    return chosen[:, None].expand(*mask.shape, num_teachers)


def mopd(
    logp: Tensor,
    behavior_logp: Tensor,
    teacher_logps: Tensor,
    mask: Tensor,
    weights: object = None,
    route: Tensor | None = None,
    eps_low: float = 0.5,
    eps_high: float = 2.0,
    mix: Literal["log", "prob"] = "log",
    alpha: float = 0.0,
    orm_adv: Tensor | None = None,
    truncate: Literal["drop", "clip"] = "drop",
    agg: AggregationMode = "seq-mean-token-mean",
    agg_kw: AggKw = None,
) -> Results:
    """The project offers mix=log (mix=prob: the logarithm of the mean probability), truncate=drop as method=mask, and
    truncate=clip as method=tis. Teacher and policy log-probs are those of the same weights."""
    shares = teacher_weights(mask, len(teacher_logps), weights, route).movedim(-1, 0)
    if mix == "prob":
        mixed = (teacher_logps + shares.log()).logsumexp(dim=0)
    else:
        mixed = logp.detach() + (shares * (teacher_logps - logp.detach())).sum(dim=0)  # for rounded weights
    advantage = compute_target_advantages(logp.detach(), mixed, mask).advantages
    if orm_adv is not None:
        advantage = apply_mask(advantage + alpha * orm_adv.reshape(len(mask), -1), mask)
    method: Literal["mask", "tis"] = "mask" if truncate == "drop" else "tis"
    weight = rollout_correction_weights(logp, behavior_logp, mask, method=method, low=eps_low, high=eps_high)
    token_loss = apply_mask(weight * policy_gradient(logp, advantage), mask)
    loss = aggregated(token_loss, mask, agg, agg_kw)
    return {"loss": loss, "token_loss": token_loss, "advantage": advantage, "weight": weight}


def mopd_full(
    logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    weights: object = None,
    route: Tensor | None = None,
    topk: int | None = None,
    token_weights: Tensor | None = None,
    agg: AggregationMode = "seq-mean-token-mean",
    coef: float = 1.0,
    agg_kw: AggKw = None,
) -> Results:
    """From the trainer's output head, with the logits as its hidden states."""
    shares = teacher_weights(mask, len(teacher_logits), weights, route).movedim(-1, 0)
    pairs = zip(teacher_logits, shares, strict=True)
    teachers = [WeightedModel(head_input(other), share.flatten()) for other, share in pairs]
    divergence = apply_mask(head_divergence(logits, DivergenceTarget(teachers, REVERSE, top_k=topk)), mask)
    weighted = divergence if token_weights is None else divergence * token_weights
    return {"loss": coef * aggregated(weighted, mask, agg, agg_kw), "token_divergence": divergence}
