"""Distillation from one or several teachers with the names and parameters of the vectors files."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.kl import REVERSE, compute_target_advantages
from alphaapollo.algorithms.mismatch import rollout_correction_weights
from alphaapollo.algorithms.policy_losses.ppo import policy_gradient
from alphaapollo.algorithms.statistics import apply_mask
from alphaapollo.models.lm_head import DivergenceTarget, WeightedModel
from tests.golden.common import SEQUENCE_MEAN, WEIGHTED_SEQUENCE_MEAN, Results, head_divergence, head_input


def teacher_weights(mask: Tensor, num_teachers: int, weights: object, route: Tensor | None) -> Tensor:
    """Weight of each teacher for each token: given, one teacher per row, or the mean. [B, L, D]"""
    if weights is not None:
        return torch.as_tensor(weights, dtype=mask.dtype)
    if route is None:
        return mask.new_full((*mask.shape, num_teachers), 1 / num_teachers)
    chosen = torch.nn.functional.one_hot(route.long(), num_teachers).to(mask.dtype)
    return chosen[:, None].expand(*mask.shape, num_teachers)


def mopd(
    logp,
    behavior_logp,
    teacher_logps,
    mask,
    weights=None,
    route=None,
    eps_low=0.5,
    eps_high=2.0,
    mix: Literal["log", "prob"] = "log",
    alpha=0.0,
    orm_adv=None,
    truncate: Literal["drop", "clip"] = "drop",
    agg=SEQUENCE_MEAN,
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
    method = "mask" if truncate == "drop" else "tis"
    weight = rollout_correction_weights(logp, behavior_logp, mask, method=method, low=eps_low, high=eps_high)
    token_loss = apply_mask(weight * policy_gradient(logp, advantage), mask)
    return {"loss": agg.sum(token_loss, mask), "token_loss": token_loss, "advantage": advantage, "weight": weight}


def mopd_full(
    logits, teacher_logits, mask, weights=None, route=None, topk=None, agg=WEIGHTED_SEQUENCE_MEAN, coef=1.0
) -> Results:
    """From the trainer's output head, with the logits as its hidden states."""
    shares = teacher_weights(mask, len(teacher_logits), weights, route).movedim(-1, 0)
    pairs = zip(teacher_logits, shares, strict=True)
    teachers = [WeightedModel(head_input(other), share.flatten()) for other, share in pairs]
    divergence = apply_mask(head_divergence(logits, DivergenceTarget(teachers, REVERSE, top_k=topk)), mask)
    return {"loss": coef * agg.sum(agg.weigh(divergence), mask), "token_divergence": divergence}
