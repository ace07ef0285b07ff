"""Policy losses, advantages and KL of 2026 with the names and parameters of the vectors files.

The following exist only here: the surrogate `reinforce` and the parameters `kl_eps` and `kl_tau` of DPPO, its
divergences over the top-K tokens, and `eps` and `ratio_sg`, which reproduce other implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms import kl
from alphaapollo.algorithms.advantages.grpo import maxrl as maxrl_advantages
from alphaapollo.algorithms.mismatch import off_policy_sequence_mask as sequence_mask
from alphaapollo.algorithms.policy_losses import gspo, ppo
from alphaapollo.algorithms.statistics import Groups, apply_mask, masked_mean, row_mean
from tests.golden.common import CORRECTED, SEQUENCE_MEAN, TOKEN_MEAN, Results, groups_of, log_ratio, on_tokens

Divergence = Literal["binary_tv", "binary_kl", "symmetric_tv", "given"]


def dppo(
    logp,
    behavior_logp,
    adv,
    mask,
    kind: Divergence = "binary_tv",
    delta_low=0.2,
    delta_high=0.2,
    ratio_cap=None,
    surrogate: Literal["ratio", "reinforce"] = "ratio",
    kl_eps=0.0,
    kl_tau=0.0,
    agg=CORRECTED,
    divergence=None,
) -> Results:
    d, constant = log_ratio(logp, behavior_logp, mask), logp.detach()
    if divergence is None:
        function = binary_kl(kl_eps) if kind == "binary_kl" else ppo.binary_tv
        divergence = function(constant, behavior_logp)
    dropped = ppo.is_dropped(d, divergence, adv, delta_low, delta_high)
    if kind == "symmetric_tv":
        dropped = divergence > delta_high
    cap = math.inf if ratio_cap is None else ratio_cap
    loss = ppo.dppo(logp, d, adv, dropped, cap)
    if surrogate == "reinforce":
        loss = apply_mask(-d.detach().exp().clamp(max=cap) * adv * logp, ~dropped)
    loss = apply_mask(agg.weigh(loss) + kl_tau * d**2, mask)
    return {
        "loss": agg.sum(loss, mask),
        "token_loss": loss,
        "keep": apply_mask((~dropped).to(logp.dtype), mask),
        "divergence": apply_mask(divergence, mask),
        "dropfrac": masked_mean(dropped.to(logp.dtype), mask),
    }


def binary_kl(eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The project's binary KL for eps=0, else that of other implementations, which add eps to both complements."""

    def with_eps(logp: Tensor, behavior_logp: Tensor) -> Tensor:
        rest, behavior_rest = -torch.expm1(logp), -torch.expm1(behavior_logp)
        others = behavior_rest * ((behavior_rest + eps).log() - (rest + eps).log())
        return behavior_logp.exp() * (behavior_logp - logp) + others

    return with_eps if eps else ppo.binary_kl


def dppo_topk_divergence(logits, behavior_logits, tokens, k=20, include_sampled=True) -> Results:
    """Divergences over the top-K tokens of the engine and one category for all others (arXiv 2602.04879, Eq. 15-16)."""
    full = logits.log_softmax(-1), behavior_logits.log_softmax(-1)
    index = tokens.long().unsqueeze(-1)
    listed = torch.zeros_like(full[0], dtype=torch.bool).scatter_(-1, full[1].topk(k).indices, True)
    if include_sampled:
        listed = listed.scatter_(-1, index, True)
    pi, mu = (torch.cat([p * listed, (p * ~listed).sum(-1, keepdim=True)], -1) for p in (each.exp() for each in full))
    sampled, behavior = (each.gather(-1, index).squeeze(-1) for each in full)
    return {
        "tv": 0.5 * (mu - pi).abs().sum(-1),
        "kl": (torch.xlogy(mu, mu) - torch.xlogy(mu, pi)).sum(-1),
        "binary_tv": ppo.binary_tv(sampled, behavior),
        "binary_kl": ppo.binary_kl(sampled, behavior),
        "full_tv": 0.5 * (full[1].exp() - full[0].exp()).abs().sum(-1),
        "full_kl": (full[1].exp() * (full[1] - full[0])).sum(-1),
    }


def dppo_topk(
    logits,
    behavior_logits,
    tokens,
    adv,
    mask,
    k=20,
    kind: Literal["tv", "kl"] = "tv",
    delta_low=0.2,
    delta_high=0.2,
    agg=TOKEN_MEAN,
    include_sampled=True,
) -> Results:
    divergence = dppo_topk_divergence(logits.detach(), behavior_logits, tokens, k, include_sampled)[kind]
    index = tokens.long().unsqueeze(-1)
    logp, behavior = (x.log_softmax(-1).gather(-1, index).squeeze(-1) for x in (logits, behavior_logits))
    results = dppo(logp, behavior, adv, mask, "given", delta_low, delta_high, agg=agg, divergence=divergence)
    return {**results, "logp": logp}


def maxrl(scores, index, mask, eps=0.0) -> Results:
    groups = groups_of(index)
    advantages = maxrl_with_eps(scores, groups, eps) if eps else maxrl_advantages(scores, groups)
    return {"seq_adv": advantages, "advantages": on_tokens(advantages, mask)}


def maxrl_with_eps(scores: Tensor, groups: Groups, eps: float) -> Tensor:
    """Advantages of the authors' code, without a branch for small groups and small means."""
    means = torch.where(groups.sizes > 1, groups.mean(scores), 0.0)[groups.group_index]
    return (scores - means) / (means + eps)


def maxrl_bandit(logits, rewards, n) -> Results:
    """Expected gradients of the estimator over all groups of n samples, and the gradients that they estimate."""
    probs = logits.softmax(0)
    scores = torch.eye(len(logits), dtype=logits.dtype) - probs  # gradient of log pi(action), one row per action
    p = (probs * rewards).sum()
    gradient = (probs * rewards) @ scores
    practical, plain = torch.zeros_like(gradient), torch.zeros_like(gradient)
    one_group = Groups.from_ids(torch.zeros(n, dtype=torch.int64))
    for group in product(range(len(logits)), repeat=n):
        actions = torch.tensor(group)
        chance, won = probs[actions].prod(), rewards[actions]
        practical += chance * (maxrl_advantages(won, one_group) @ scores[actions]) / n
        plain += chance * (won @ scores[actions]) / won.sum().clamp(min=1)
    order = {m: (1 - (1 - p) ** m) / p * gradient for m in (n - 1, n)}
    return {
        "p": p,
        "practical": practical,
        "plain": plain,
        "order_n": order[n],
        "order_n_minus_1": order[n - 1],
        "maximum_likelihood": gradient / p,
        "reinforce": gradient,
    }


def weighted_k3(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor, ratio_sg: bool) -> Tensor:
    """The project's unbiased KL, or with ratio_sg the same value with a constant ratio."""
    if ratio_sg:
        return log_ratio(logp.detach(), old_logp, mask).exp() * kl.kl_penalty(logp, ref_logp, "k3")
    return kl.unbiased_kl(logp, old_logp, ref_logp, mask)


def unbiased_kl(logp, old_logp, ref_logp, mask, coef=1.0, agg=TOKEN_MEAN, ratio_sg=False) -> Results:
    token_kl = apply_mask(weighted_k3(logp, old_logp, ref_logp, mask, ratio_sg), mask)
    return {"loss": coef * agg.sum(token_kl, mask), "token_kl": token_kl}


def unbiased_kl_bandit(logits, old_logits, ref_logits, ratio_sg=False) -> Results:
    """Expected value and gradient over all actions of the old policy, and those of KL(pi||ref)."""
    logits = logits.clone().requires_grad_()
    logp, old, ref = (x.log_softmax(0) for x in (logits, old_logits, ref_logits))
    exact = (logp.exp() * (logp - ref)).sum()
    expected = (old.exp() * weighted_k3(logp, old, ref, torch.ones_like(logp), ratio_sg)).sum()
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (exact, expected)]
    return {"kl": exact, "kl_grad": gradients[0], "expected_value": expected, "expected_grad": gradients[1]}


def off_policy_sequence_mask(logp, behavior_logp, adv, mask, delta) -> Results:
    keep = sequence_mask(logp, behavior_logp, adv, mask, delta)
    return {"keep": keep, "seq_kl": row_mean(behavior_logp - logp, mask)}


def deepseek_v32(
    logp,
    old_logp,
    ref_logp,
    adv,
    mask,
    eps_low=0.2,
    eps_high=0.2,
    beta=0.0,
    delta=None,
    behavior_logp=None,
    agg=SEQUENCE_MEAN,
) -> Results:
    behavior = old_logp if behavior_logp is None else behavior_logp
    keep = sequence_mask(logp, behavior, adv, mask, math.inf if delta is None else delta)
    loss = ppo.ppo_clip(log_ratio(logp, old_logp, mask).exp(), adv, eps_low, eps_high) * keep
    loss = loss + beta * kl.unbiased_kl(logp, old_logp, ref_logp, mask)
    return {"loss": agg.sum(loss, mask), "keep": keep}


def vespo(
    logp, behavior_logp, seq_adv, mask, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0, agg=TOKEN_MEAN
) -> Results:
    log_w = gspo.sequence_log_ratio(logp.detach(), behavior_logp, mask)
    phi = gspo.vespo_weight(log_w, seq_adv, (k_pos, lambda_pos), (k_neg, lambda_neg))
    loss = apply_mask(-(phi * seq_adv).unsqueeze(1) * logp, mask)
    return {"loss": agg.sum(loss, mask), "token_loss": loss, "phi": phi, "log_w": log_w}
