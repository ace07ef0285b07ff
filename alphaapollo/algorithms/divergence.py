"""Divergences between the policy's distribution p and a frozen distribution q (of another model).

    kind      value D                                            gradient w.r.t. the logits of p
    reverse   KL(p||q)                                           p (log p/q - D)
    forward   KL(q||p)                                           p - q
    jsd       b KL(q||m) + (1-b) KL(p||m),  m = b q + (1-b) p    (1-b) p (log p/m - KL(p||m))

jsd is the generalised Jensen-Shannon divergence of arXiv 2306.13649 (section 2): D / b tends to the forward KL as b
tends to 0, D / (1-b) to the reverse KL as b tends to 1.

In self-distillation (SDPO, arXiv 2601.20802; SDFT, arXiv 2601.19897), q is the policy, or a moving average of it, with
more context than the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import apply_mask, log_ratio, masked_mean

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


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute KL(p||q) in nats. [..., V] each -> [...]."""
    kl_values: Tensor = torch.linalg.vecdot(logp.exp(), logp - logq)
    return kl_values


def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute KL(q||p) in nats. [..., V] each -> [...]."""
    return kl(logq, logp)


def spread_tail(logp: Tensor, token_ids: Tensor, logprobs: Tensor, tail: Tensor) -> Tensor:
    """Complete the k most probable tokens of q to log-probs of all tokens, for a divergence over k + 1 outcomes.

    The other tokens share the probability of the tail in proportion to p. Value and gradient of every Divergence over
    the vocabulary then equal those over the k tokens and one outcome for all others, because p / q is constant on them.

    Args:
        logp: [..., V].
        token_ids: int64 [..., k]; a repeated token must have the same log-prob.
        logprobs: log-probs of these tokens, [..., k].
        tail: log-prob of all other tokens together, [...].
    """
    own_tail = logp.scatter(-1, token_ids, -math.inf).logsumexp(dim=-1)
    return (logp + (tail - own_tail).unsqueeze(-1)).scatter(-1, token_ids, logprobs)


def distribution_overlap(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute the overlap sum_v min(p_v, q_v) of two distributions, between 0 and 1. [..., V] each -> [...]."""
    return torch.minimum(logp, logq).exp_().sum(dim=-1)


def _kl_gradient(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute the gradient of KL(p||q) with respect to the logits of p, with q constant. [..., V] each -> [..., V]."""
    log_ratio, p = logp - logq, logp.exp()
    return log_ratio.sub_(torch.linalg.vecdot(p, log_ratio).unsqueeze(-1)).mul_(p)


class TargetAdvantages(NamedTuple):
    """Advantages of sampled tokens from q's log-probs, and metrics."""

    advantages: Tensor  # [B, L], 0 outside the mask
    reverse_kl: float  # mean of log p - log q, in nats per token
    agreement: float  # mean of min(1, q/p), an estimate of `distribution_overlap`


def compute_target_advantages(old_logp: Tensor, target_logp: Tensor, mask: Tensor) -> TargetAdvantages:
    """Compute A_t = target_logp - old_logp, whose policy gradient minimizes the reverse KL. [B, L] each.

    A token's advantage ignores later tokens; MiniLLM (arXiv 2306.08543, Eq. 2-5) sums over them.
    """
    log_ratio = apply_mask(target_logp - old_logp, mask)
    agreement = log_ratio.clamp(max=0.0).exp()
    return TargetAdvantages(log_ratio, -float(masked_mean(log_ratio, mask)), float(masked_mean(agreement, mask)))


def update_moving_average(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """Set average = (1 - rate) average + rate value, in place. Returns `average`. rate: between 0 and 1."""
    return average.lerp_(value, rate)


def truncated_ratios(logp: Tensor, old_logp: Tensor, mask: Tensor, max_ratio: float) -> Tensor:
    """Compute token weights min(pi / pi_old, max_ratio), without gradient (arXiv 2601.20802, `is_clip` of its code).

    [B, L] each: log-probs of the sampled tokens. 1 outside the mask.
    """
    return log_ratio(logp.detach(), old_logp, mask).exp().clamp(max=max_ratio)
