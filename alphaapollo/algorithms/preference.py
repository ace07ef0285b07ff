"""Losses on pairs of answers, per pair. Log-probs are sums over the tokens of an answer unless stated otherwise.

u, v: log pi/ref of the chosen and the rejected answer; margin h = u - v. All tensors and results
are [P], one entry per pair. The implicit rewards are beta u and beta v. preference_losses.py registers them by name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1-e) log s(beta h) - e log s(-beta h): DPO (arXiv 2305.18290, Eq. 7); cDPO with label_smoothing e > 0."""
    z = beta * margin
    return -(1.0 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def robust_dpo(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """[-(1-e) log s(beta h) + e log s(-beta h)] / (1 - 2e) for labels flipped with probability e < 1/2
    (arXiv 2403.00409)."""
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"robust DPO needs label_smoothing in [0, 0.5), got {label_smoothing}.")
    z = beta * margin
    flipped = -(1.0 - label_smoothing) * logsigmoid(z) + label_smoothing * logsigmoid(-z)
    return flipped / (1.0 - 2.0 * label_smoothing)


def ipo(margin: Tensor, tau: float) -> Tensor:
    """(h - 1/(2 tau))^2 (arXiv 2310.12036, Eq. 17). The paper's h uses sums; for the per-token form pass a margin of
    per-token means."""
    return (margin - 1.0 / (2.0 * tau)) ** 2


def hinge(margin: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta h): RSO (arXiv 2309.06657)."""
    return torch.relu(1.0 - beta * margin)


def slic(chosen: Tensor, rejected: Tensor, delta: float = 1.0) -> Tensor:
    """max(0, delta - (log pi_w - log pi_l)): SLiC-HF's calibration term (arXiv 2305.10425), without a reference.
    The paper adds -lambda log pi of a supervised target."""
    return torch.relu(delta - (chosen - rejected))


def exo_pair(margin: Tensor, beta: float, label_smoothing: float = 1e-3) -> Tensor:
    """KL from the policy's preference to the (smoothed) label: s log(s/(1-e)) + (1-s) log((1-s)/e), s = s(beta h)
    (arXiv 2402.00856). Needs label_smoothing e in (0, 1)."""
    if not 0.0 < label_smoothing < 1.0:
        raise ValueError(f"EXO needs label_smoothing in (0, 1), got {label_smoothing}. The paper uses 1e-3.")
    z = beta * margin
    chosen = z.sigmoid() * (logsigmoid(z) - math.log(1.0 - label_smoothing))
    return chosen + (-z).sigmoid() * (logsigmoid(-z) - math.log(label_smoothing))


def nca_pair(u: Tensor, v: Tensor, beta: float) -> Tensor:
    """-log s(beta u) - [log s(-beta u) + log s(-beta v)] / 2 (arXiv 2402.05369)."""
    return -logsigmoid(beta * u) - 0.5 * logsigmoid(-beta * u) - 0.5 * logsigmoid(-beta * v)


def sppo_hard(u: Tensor, v: Tensor, beta: float) -> Tensor:
    """(u - 1/(2 beta))^2 + (v + 1/(2 beta))^2 (arXiv 2405.00675)."""
    return (u - 0.5 / beta) ** 2 + (v + 0.5 / beta) ** 2


def apo_zero(u: Tensor, v: Tensor, beta: float) -> Tensor:
    """1 - s(beta u) + s(beta v): raise the chosen, lower the rejected (arXiv 2408.06266)."""
    return (-beta * u).sigmoid() + (beta * v).sigmoid()


def apo_down(u: Tensor, v: Tensor, beta: float) -> Tensor:
    """s(beta u) + 1 - s(beta (u - v)): lower both, the rejected more (arXiv 2408.06266)."""
    return (beta * u).sigmoid() + (-beta * (u - v)).sigmoid()


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    kl: Tensor,
    beta: float,
    weight_desirable: float = 1.0,
    weight_undesirable: float = 1.0,
) -> Tensor:
    """lambda - lambda s(+-beta (u - z0)) for single answers with a binary label (arXiv 2402.01306, Eq. 8).

    log_ratio u, desirable (0/1) [P]; kl: estimate of KL(pi||ref) over the batch, a constant, floored at 0.
    """
    z = beta * (log_ratio - kl.detach().clamp(min=0.0))
    return torch.where(desirable.bool(), weight_desirable * (-z).sigmoid(), weight_undesirable * z.sigmoid())


def orpo(chosen_mean: Tensor, rejected_mean: Tensor, weight: float) -> Tensor:
    """-log p_w - weight log s(log odds_w - log odds_l) on per-token *mean* log-probs, odds = p / (1 - p)
    (arXiv 2403.07691, Eq. 6-7). No reference."""
    log_odds = chosen_mean - _log1mexp(chosen_mean) - (rejected_mean - _log1mexp(rejected_mean))
    return -chosen_mean - weight * logsigmoid(log_odds)


def simpo(chosen_mean: Tensor, rejected_mean: Tensor, beta: float, gamma: float) -> Tensor:
    """-log s(beta (mean log pi_w - mean log pi_l) - gamma) (arXiv 2405.14734, Eq. 6). No reference."""
    return -logsigmoid(beta * (chosen_mean - rejected_mean) - gamma)


def _log1mexp(logp: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, by the branch without cancellation."""
    return torch.where(
        logp > -math.log(2.0),
        torch.log(-torch.expm1(logp)),
        torch.log1p(-torch.exp(logp)),
    )
