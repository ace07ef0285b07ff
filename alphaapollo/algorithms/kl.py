"""Estimators of the KL divergence to a reference policy, the KL penalty in the reward, and divergences between the
distributions of the policy and another model.

Estimators use log-probs of sampled tokens, with d = log pi - log ref. docs/algorithms/loss_parts.md has the means of
their values and gradients. `full` needs both distributions; models/lm_head.py computes it.

Divergences between the policy's distribution p and a frozen distribution q (arXiv 2306.13649, section 2, for jsd):

    kind      value D                                            gradient w.r.t. the logits of p
    reverse   KL(p||q)                                           p (log p/q - D)
    forward   KL(q||p)                                           p - q
    jsd       b KL(q||m) + (1-b) KL(p||m),  m = b q + (1-b) p    (1-b) p (log p/m - KL(p||m))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms.statistics import MAX_LOG_RATIO, apply_mask, log_ratio, masked_mean

ESTIMATORS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
"""Estimator names in the config -> formula."""


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimate KL(pi||ref) at each sampled token, in nats. Any equal shapes.

    kind: key of ESTIMATORS. With a trailing +, the result has the value of that estimator and the gradient of k2. k3
    clamps the log-ratio from below at -MAX_LOG_RATIO, so that exp stays finite.
    """
    d = logp - ref_logp
    k2 = 0.5 * d**2
    match ESTIMATORS[kind.removesuffix("+")]:
        case "k1":
            value = d
        case "abs":
            value = d.abs()
        case "k2":
            value = k2
        case _:
            clamped = d.clamp(min=-MAX_LOG_RATIO)
            value = torch.expm1(-clamped) + clamped
    return k2 - k2.detach() + value.detach() if kind.endswith("+") else value


def unbiased_kl(logp: Tensor, behavior_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(pi||ref) at each sampled token as (pi / mu) k3, in nats (arXiv 2512.02556, Eq. 7). All [B, L].

    behavior_logp: log-probs of the policy mu that sampled the tokens. The ratio pi / mu also has a gradient, so that
    expectations over tokens of mu are KL(pi||ref) and its gradient. The gradient (pi / mu) d is computed directly,
    because differentiating the product would subtract terms of size e^-d.
    """
    detached_logp = logp.detach()
    ratio = log_ratio(detached_logp, behavior_logp, mask).exp()
    gradient = apply_mask(ratio * (detached_logp - ref_logp), mask)
    return ratio * kl_penalty(detached_logp, ref_logp, "k3") + gradient * (logp - detached_logp)


@dataclass(frozen=True, slots=True)
class KLShapedRewards:
    """Token rewards after subtracting the KL penalty, and the mean KL per sequence and per token."""

    token_rewards: Tensor  # [n]
    kl_per_sequence: Tensor  # scalar: sum over tokens, mean over non-empty sequences; input of next_kl_coef
    kl_per_token: Tensor  # scalar: mean over each sequence's tokens, then over non-empty sequences


def subtract_kl(
    token_rewards: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    lengths: Tensor,
    coef: float,
    kind: str = "kl",
) -> KLShapedRewards:
    """Subtract coef * kl_penalty from the reward of each action token (arXiv 1909.08593, Eq. 2).

    Tensors have one value for each of n tokens. lengths: [N] tokens of each sequence, action tokens or not; their sum
    is n.
    """
    kl = apply_mask(kl_penalty(old_logp, ref_logp, kind), mask)
    kl_sums, num_actions = (torch.segment_reduce(values.to(kl.dtype), "sum", lengths=lengths) for values in (kl, mask))
    num_sequences = (num_actions > 0).sum().clamp(min=1)
    return KLShapedRewards(
        token_rewards=token_rewards - coef * kl,
        kl_per_sequence=kl_sums.sum() / num_sequences,
        kl_per_token=(kl_sums / num_actions.clamp(min=1)).sum() / num_sequences,
    )


DivergenceKind = Literal["reverse", "forward", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """Divergence between distributions p and q over the vocabulary, computed from finite log-probs [..., V]."""

    kind: DivergenceKind
    beta: float = 0.5  # weight b of jsd, between 0 and 1

    def value(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Compute the divergence in nats. [..., V] each -> [...]."""
        match self.kind:
            case "reverse":
                return kl(logp, logq)
            case "forward":
                return forward_kl(logp, logq)
            case "jsd":
                mixture = self._mixture_logp(logp, logq)
                return self.beta * kl(logq, mixture) + (1.0 - self.beta) * kl(logp, mixture)

    def gradient(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Compute the gradient with respect to the logits of p. [..., V] each -> [..., V]."""
        match self.kind:
            case "reverse":
                return _kl_gradient(logp, logq)
            case "forward":
                return logp.exp().sub_(logq.exp())
            case "jsd":
                return _kl_gradient(logp, self._mixture_logp(logp, logq)).mul_(1.0 - self.beta)

    def _mixture_logp(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Compute the log-probs of b q + (1-b) p. [..., V] each -> [..., V]."""
        return torch.logaddexp(logq + math.log(self.beta), logp + math.log1p(-self.beta))


REVERSE = Divergence("reverse")


class LogProbVariance(Divergence):
    """Variance of log p under p, in place of a divergence from q. It has no gradient."""

    def value(self, logp: Tensor, logq: Tensor) -> Tensor:
        p = logp.exp()
        mean = (p * logp).sum(dim=-1, keepdim=True)
        return (p * (logp - mean).square()).sum(dim=-1)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute KL(p||q) in nats. [..., V] each -> [...]."""
    kl_values: Tensor = torch.linalg.vecdot(logp.exp(), logp - logq)
    return kl_values


def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute KL(q||p) in nats. [..., V] each -> [...]."""
    return kl(logq, logp)


def spread_tail(logp: Tensor, top_ids: Tensor, top_logq: Tensor, tail: Tensor) -> Tensor:
    """Extend the log-probs of q's k most probable tokens to all tokens, for a divergence over k + 1 outcomes.

    All other tokens, the tail, share the probability of the tail in proportion to p. As p / q is constant on the tail,
    value and gradient of every Divergence over the vocabulary equal those over the k tokens and the tail as a whole.

    Args:
        logp: [..., V].
        top_ids: int64 [..., k]; a repeated token must have the same log-prob.
        top_logq: log-probs of these tokens under q, [..., k].
        tail: log-prob of all other tokens together under q, [...].
    """
    tail_logp = logp.scatter(-1, top_ids, -math.inf).logsumexp(dim=-1)
    return (logp + (tail - tail_logp).unsqueeze(-1)).scatter(-1, top_ids, top_logq)


def distribution_overlap(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute the overlap sum_v min(p_v, q_v) of two distributions, between 0 and 1. [..., V] each -> [...]."""
    return torch.minimum(logp, logq).exp_().sum(dim=-1)


def _kl_gradient(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute the gradient of KL(p||q) with respect to the logits of p, with q constant. [..., V] each -> [..., V]."""
    difference, p = logp - logq, logp.exp()
    return difference.sub_(torch.linalg.vecdot(p, difference).unsqueeze(-1)).mul_(p)


class TargetAdvantages(NamedTuple):
    """Advantages of sampled tokens from q's log-probs, and metrics."""

    advantages: Tensor  # [B, L], 0 outside the mask
    reverse_kl: float  # mean of log p - log q, in nats per token
    agreement: float  # mean of min(1, q/p), an estimate of `distribution_overlap`


def compute_target_advantages(old_logp: Tensor, target_logp: Tensor, mask: Tensor) -> TargetAdvantages:
    """Compute A_t = target_logp - old_logp. The policy gradient with A minimizes the reverse KL. [B, L] each.

    A token's advantage ignores later tokens. In MiniLLM (arXiv 2306.08543, Eq. 2-5) it is a sum over them.
    """
    advantages = apply_mask(target_logp - old_logp, mask)
    agreement = advantages.clamp(max=0.0).exp()
    return TargetAdvantages(advantages, -float(masked_mean(advantages, mask)), float(masked_mean(agreement, mask)))


def update_moving_average(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """Set average = (1 - rate) average + rate value, in place. Returns `average`. rate: between 0 and 1."""
    return average.lerp_(value, rate)


def truncated_ratios(logp: Tensor, old_logp: Tensor, mask: Tensor, max_ratio: float) -> Tensor:
    """Compute token weights min(pi / pi_old, max_ratio), without gradient (arXiv 2601.20802, `is_clip` of its code).

    [B, L] each: log-probs of the sampled tokens. 1 outside the mask.
    """
    return log_ratio(logp.detach(), old_logp, mask).exp().clamp(max=max_ratio)
