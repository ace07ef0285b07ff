"""Self-distillation with the names and parameters of the vectors files."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.kl import (
    Divergence,
    compute_target_advantages,
    truncated_ratios,
    update_moving_average,
)
from alphaapollo.algorithms.statistics import apply_mask
from alphaapollo.models.lm_head import DivergenceTarget
from tests.golden.common import TOKEN_MEAN, WEIGHTED, Results, head_divergence, head_input, log_ratio


def make_divergence(alpha: float) -> Divergence:
    """Divergence of the parameter `alpha`: 1 is the reverse KL, 0 the forward KL, and jsd between."""
    if alpha in (0.0, 1.0):
        return Divergence("reverse" if alpha else "forward")
    return Divergence("jsd", beta=alpha)


def select_top_logits(logits: Tensor, teacher_logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Both models' logits of the student's top k tokens, which a softmax renormalizes. The project does not offer
    this variant."""
    tokens = logits.detach().topk(topk, dim=-1).indices
    return logits.gather(-1, tokens), teacher_logits.gather(-1, tokens)


def self_distillation(logits, teacher_logits, mask, alpha=1.0, topk=None, tail=True, agg=WEIGHTED, coef=1.0) -> Results:
    if topk is not None and not tail:
        logits, teacher_logits = select_top_logits(logits, teacher_logits, topk)
        topk = None
    teacher = head_input(teacher_logits)
    target = DivergenceTarget(teacher, make_divergence(alpha), top_k=topk, selects_policy_tokens=True)
    divergence = apply_mask(head_divergence(logits, target), mask)
    return {"loss": coef * agg.sum(agg.weigh(divergence), mask), "token_divergence": divergence}


def self_distillation_sampled(
    logp, teacher_logp, mask, old_logp=None, is_clip=None, agg=TOKEN_MEAN, coef=1.0
) -> Results:
    advantages = compute_target_advantages(logp.detach(), teacher_logp, mask).advantages
    losses = apply_mask(-advantages * logp, mask)
    if old_logp is not None and is_clip is not None:
        losses = losses * truncated_ratios(logp, old_logp, mask, is_clip)
    return {"loss": coef * agg.sum(losses, mask), "token_loss": losses}


def ref_kl_policy_gradient(
    logp, behavior_logp, teacher_logp, mask, delta_low=0.2, kl_tau=0.001, agg=TOKEN_MEAN
) -> Results:
    """prime-rl's form, which the project does not offer."""
    advantages = compute_target_advantages(logp.detach(), teacher_logp, mask).advantages
    log_ratios = log_ratio(logp, behavior_logp, mask)
    keep = apply_mask((logp.detach().exp() - behavior_logp.exp() >= -delta_low).to(logp.dtype), mask)
    losses = apply_mask(-keep * advantages * log_ratios.exp() + kl_tau * log_ratios.square(), mask)
    return {"loss": agg.sum(losses, mask), "token_loss": losses, "keep": keep}


def trust_region_teacher(logits, ref_logits, alpha) -> Results:
    """Teacher q ~ q_ref^(1 - alpha) q_theta^alpha, which the project does not offer. [B, L, V] each."""
    mixed = torch.lerp(ref_logits.log_softmax(-1), logits.log_softmax(-1), alpha)
    return {"log_probs": mixed.log_softmax(-1)}


def ema_teacher(teacher, students, rate) -> Results:
    """Teacher after each of the students' steps. teacher [n], students [steps, n] -> [steps, n]."""
    return {"value": torch.stack([update_moving_average(teacher, student, rate).clone() for student in students])}
