"""How far a policy's distribution p is from a frozen one q, a teacher's or the reference's, and which way is nearer.

    kind      value D                                            gradient by the logits z of p
    reverse   KL(p||q)                                           p (log p/q - D)
    forward   KL(q||p)                                           p - q
    jsd       b KL(q||m) + (1-b) KL(p||m),  m = b q + (1-b) p    (1-b) p (log p/m - KL(p||m))

jsd is the generalised Jensen-Shannon divergence of arXiv 2306.13649 (section 2): D / b goes to the forward KL as b goes
to 0, D / (1-b) to the reverse KL as b goes to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import masked, masked_mean
from alphaapollo.config.schema import Teacher

DivergenceKind = Literal["reverse", "forward", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """Between whole distributions. Log-probs [..., V] of p and q, all finite."""

    kind: DivergenceKind
    beta: float = 0.5  # of jsd, between 0 and 1

    def value(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Nats, [...]."""
        match self.kind:
            case "reverse":
                return kl(logp, logq)
            case "forward":
                return forward_kl(logp, logq)
            case "jsd":
                mixture = self._mixture(logp, logq)
                return self.beta * kl(logq, mixture) + (1.0 - self.beta) * kl(logp, mixture)

    def gradient(self, logp: Tensor, logq: Tensor) -> Tensor:
        """By the logits of p, [..., V]."""
        match self.kind:
            case "reverse":
                return _kl_gradient(logp, logq)
            case "forward":
                return logp.exp().sub_(logq.exp())
            case "jsd":
                return _kl_gradient(logp, self._mixture(logp, logq)).mul_(1.0 - self.beta)

    def _mixture(self, logp: Tensor, logq: Tensor) -> Tensor:
        return torch.logaddexp(logq + math.log(self.beta), logp + math.log1p(-self.beta))


REVERSE = Divergence("reverse")


def make_divergence(teacher: Teacher) -> Divergence:
    """Of one that compares whole distributions."""
    assert teacher.divergence is not None and teacher.divergence != "sampled"
    return Divergence(teacher.divergence, teacher.beta)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p||q). [..., V] each -> [...]"""
    return torch.linalg.vecdot(logp.exp(), logp - logq)


def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(q||p). [..., V] each -> [...]"""
    return kl(logq, logp)


def overlap(logp: Tensor, logq: Tensor) -> Tensor:
    """sum_v min(p_v, q_v), between 0 and 1: one less the total variation. [..., V] each -> [...]"""
    return torch.minimum(logp, logq).exp_().sum(dim=-1)


def _kl_gradient(logp: Tensor, logm: Tensor) -> Tensor:
    """The gradient of KL(p||m) by the logits of p, m held. [..., V]"""
    away, p = logp - logm, logp.exp()
    return away.sub_(torch.linalg.vecdot(p, away).unsqueeze(-1)).mul_(p)


class TeacherSignal(NamedTuple):
    """What a teacher says of sampled tokens."""

    advantages: Tensor  # [B, L], zero off the mask
    reverse_kl: float  # nats a token: the mean of log p - log q
    agreement: float  # the mean of min(1, q/p): its expectation over samples of p is the overlap


def teacher_signal(old_logp: Tensor, teacher_logp: Tensor, mask: Tensor) -> TeacherSignal:
    """The reverse KL as a policy gradient on samples of the policy: A_t = log q - log p, each token's own (a discount
    of 0; MiniLLM, arXiv 2306.08543, Eq. 2-5, adds up all that come after). Matrices [B, L]."""
    gap = masked(teacher_logp - old_logp, mask)
    likely = gap.clamp(max=0.0).exp()
    return TeacherSignal(gap, -float(masked_mean(gap, mask)), float(masked_mean(likely, mask)))
