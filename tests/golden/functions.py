"""Functions of the vectors files that the reference of `alphaapollo verify` does not have, with the files' names and
parameters. tests/plugins/verify/golden_functions.py has the others.

Rows without action tokens are not counted in means, which differs from the project's aggregation.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from alphaapollo.algorithms import adaptive_coefficients, kl
from alphaapollo.algorithms.advantages.grpo import maxrl, rloo
from alphaapollo.algorithms.advantages.turns import turn_group
from alphaapollo.algorithms.aggregation import aggregate_token_losses, row_weights
from alphaapollo.algorithms.mismatch import rollout_correction_weights
from alphaapollo.algorithms.policy_losses import ppo
from alphaapollo.algorithms.preference_losses import AnswerBatch, get_preference_loss
from alphaapollo.algorithms.statistics import Groups, apply_mask, has_variance, reward_to_go
from alphaapollo.config.schema import AggregationMode, KLControl, Preference
from alphaapollo.models.lm_head import (
    DivergenceTarget,
    LmHead,
    LmHeadInput,
    TokenStats,
    WeightedModel,
    compute_token_stats,
)

Results = dict[str, Any]


def golden_functions(module: ModuleType) -> dict[str, Callable[..., Results]]:
    """Public functions of a module that return Results, by name."""
    functions = inspect.getmembers(module, lambda one: inspect.isfunction(one) and one.__module__ == module.__name__)
    return {name: one for name, one in functions if one.__annotations__["return"] == "Results"}


def groups_of(index: Sequence[Any]) -> Groups:
    """Groups of names of any type."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(index))}
    return Groups.from_ids(torch.tensor([numbers[name] for name in index]))


def aggregate(loss: Tensor, mask: Tensor, mode: AggregationMode) -> Tensor:
    rows = mask.bool().any(dim=1)
    lengths = mask[rows].sum(dim=1)
    weights = row_weights(lengths, torch.zeros_like(lengths), mode, 1)
    return aggregate_token_losses(loss[rows], mask[rows], weights)


def head_input(logits: Tensor) -> LmHeadInput:
    """Input of an output head with an identity as weights: the logits are its hidden states. [..., V] -> [n, V]"""
    size = logits.shape[-1]
    return LmHeadInput(logits.reshape(-1, size), LmHead(torch.eye(size, dtype=logits.dtype)))


def head_stats(logits: Tensor, target: DivergenceTarget | None = None, needs_entropy: bool = False) -> TokenStats:
    """Statistics from the trainer's output head. [..., V] -> flat [n]"""
    tokens = torch.zeros(logits[..., 0].numel(), dtype=torch.int64)
    return compute_token_stats(head_input(logits), tokens, 1.0, needs_entropy=needs_entropy, divergence_target=target)


# Coefficients of a KL


def kl_fixed(coef, kls) -> Results:
    return _series(lambda _, kl: adaptive_coefficients.next_kl_coef(KLControl(kl_coef=coef), coef, kl, 1), coef, kls)


def kl_adaptive(coef, target, horizon, kls, n_steps) -> Results:
    config = KLControl(type="adaptive", target_kl=target, horizon=horizon)
    return _series(lambda coef, kl: adaptive_coefficients.next_kl_coef(config, coef, kl, n_steps), coef, kls)


def kl_ppo2017(coef, target, kls) -> Results:
    config = KLControl(type="doubling", target_kl=target)
    return _series(lambda coef, kl: adaptive_coefficients.next_kl_coef(config, coef, kl, 1), coef, kls)


def kl_dual_descent(lam, alpha, delta, kls) -> Results:
    update = adaptive_coefficients.next_kl_coef_by_dual_ascent
    return _series(lambda coef, kl: update(coef, kl, delta, alpha), lam, kls)


def _series(update: Callable[[float, float], float], coef: float, kls: Sequence[float]) -> dict[str, list[float]]:
    """The coefficient after each of a series of KL measurements."""
    return {"value": [*itertools.accumulate(kls, update, initial=coef)][1:]}


# Choice of tokens and samples


def clip_cov_candidates(logp, old_logp, adv, mask, ratio, low, high) -> Results:
    cov = ppo.token_covariance(logp, adv, mask)
    clipped = ppo.is_clipped(apply_mask(logp - old_logp, mask).exp(), adv, 0.2, 0.2)
    candidates, count = ppo.find_clip_cov_candidates(cov, clipped, mask, ratio, low, high)
    return {"candidates": candidates.nonzero().tolist(), "num_selected": count, "cov": cov}


def dynamic_sampling_keep(scores, index) -> Results:
    groups = groups_of(index).group_index
    kept = [has_variance(scores[groups == group].tolist()) for group in groups]
    return {"value": kept}


# Losses


def entropy_loss(logits, mask, coef) -> Results:
    entropy = head_stats(logits, needs_entropy=True).entropy
    assert entropy is not None
    per_token = apply_mask(entropy.view(mask.shape), mask)
    return {"loss": -coef * aggregate(per_token, mask, "token-mean"), "entropy": per_token}


def dpo(
    chosen, rejected, ref_chosen, ref_rejected, beta, loss_type: str = "sigmoid", label_smoothing: float = 0.0
) -> Results:
    def interleaved(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], dim=1).flatten()

    logp, ref_logp = interleaved(chosen, rejected), interleaved(ref_chosen, ref_rejected)
    answers = AnswerBatch(logp, torch.ones_like(logp), torch.tensor([True, False] * len(chosen)), ref_logp)
    config = Preference(beta=beta, label_smoothing=label_smoothing or None)  # null is the default of the loss
    pair_loss = get_preference_loss(loss_type).fn(answers, beta, config)
    rewards = {"reward_chosen": beta * (chosen - ref_chosen), "reward_rejected": beta * (rejected - ref_rejected)}
    return {"loss": pair_loss.mean(), "pair_loss": pair_loss, **rewards}


def teacher_weights(mask: Tensor, num_teachers: int, weights: object, route: Tensor | None) -> Tensor:
    """Weight of each teacher for each token: given, one teacher per row, or the mean. [D, B, L]"""
    if weights is not None:
        return torch.as_tensor(weights, dtype=mask.dtype).expand(*mask.shape, num_teachers).movedim(-1, 0)
    if route is None:
        return mask.new_full((num_teachers, *mask.shape), 1 / num_teachers)
    chosen = torch.nn.functional.one_hot(route.long(), num_teachers).to(mask.dtype)
    return chosen[:, None].expand(*mask.shape, num_teachers).movedim(-1, 0)


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
    agg: AggregationMode = "seq-mean-token-mean",
) -> Results:
    """The project offers mix=log (mix=prob: the logarithm of the mean probability), truncate=drop as method=mask, and
    truncate=clip as method=tis. Teacher and policy log-probs are those of the same weights."""
    shares = teacher_weights(mask, len(teacher_logps), weights, route)
    if mix == "prob":
        mixed = (teacher_logps + shares.log()).logsumexp(dim=0)
    else:
        mixed = logp.detach() + (shares * (teacher_logps - logp.detach())).sum(dim=0)  # for rounded weights
    advantage = kl.compute_target_advantages(logp.detach(), mixed, mask).advantages
    if orm_adv is not None:
        advantage = apply_mask(advantage + alpha * orm_adv.reshape(len(mask), -1), mask)
    method = "mask" if truncate == "drop" else "tis"
    weight = rollout_correction_weights(logp, behavior_logp, mask, method=method, low=eps_low, high=eps_high)
    token_loss = apply_mask(weight * ppo.policy_gradient(logp, advantage), mask)
    loss = aggregate(token_loss, mask, agg)
    return {"loss": loss, "token_loss": token_loss, "advantage": advantage, "weight": weight}


def mopd_full(logits, teacher_logits, mask, weights=None, route=None, topk=None, token_weights=None) -> Results:
    """From the trainer's output head, with the logits as its hidden states."""
    shares = teacher_weights(mask, len(teacher_logits), weights, route)
    pairs = zip(teacher_logits, shares, strict=True)
    teachers = [WeightedModel(head_input(other), share.flatten()) for other, share in pairs]
    found = head_stats(logits, DivergenceTarget(teachers, kl.REVERSE, top_k=topk)).divergence
    assert found is not None
    divergence = apply_mask(found.view(mask.shape), mask)
    weighted = divergence if token_weights is None else divergence * token_weights
    return {"loss": aggregate(weighted, mask, "seq-mean-token-mean"), "token_divergence": divergence}


def self_distillation_sampled(logp, teacher_logp, mask, old_logp=None, is_clip=None) -> Results:
    advantages = kl.compute_target_advantages(logp.detach(), teacher_logp, mask).advantages
    losses = apply_mask(-advantages * logp, mask)
    if is_clip is not None:
        losses = losses * kl.truncated_ratios(logp, old_logp, mask, is_clip)
    return {"loss": aggregate(losses, mask, "token-mean"), "token_loss": losses}


def ema_teacher(teacher, students, rate) -> Results:
    """Teacher after each of the students' steps. teacher [n], students [steps, n] -> [steps, n]."""
    return {"value": torch.stack([kl.update_moving_average(teacher, student, rate).clone() for student in students])}


# Expectations over all samples


def maxrl_bandit(logits, rewards, n) -> Results:
    """Expected gradients of the estimator over all groups of n samples, and the gradients that they estimate."""
    probs = logits.softmax(0)
    scores = torch.eye(len(logits), dtype=logits.dtype) - probs  # gradient of log pi(action), one row per action
    p = (probs * rewards).sum()
    gradient = (probs * rewards) @ scores
    practical, plain = torch.zeros_like(gradient), torch.zeros_like(gradient)
    one_group = Groups.from_ids(torch.zeros(n, dtype=torch.int64))
    for group in itertools.product(range(len(logits)), repeat=n):
        actions = torch.tensor(group)
        chance, won = probs[actions].prod(), rewards[actions]
        practical += chance * (maxrl(won, one_group) @ scores[actions]) / n
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


def unbiased_kl_bandit(logits, old_logits, ref_logits, ratio_sg=False) -> Results:
    """Expected value and gradient over all actions of the old policy, and those of KL(pi||ref)."""
    assert not ratio_sg, "the project has no variant with a constant ratio"
    logits = logits.clone().requires_grad_()
    logp, old, ref = (x.log_softmax(0) for x in (logits, old_logits, ref_logits))
    exact = (logp.exp() * (logp - ref)).sum()
    expected = (old.exp() * kl.unbiased_kl(logp, old, ref, torch.ones_like(logp))).sum()
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (exact, expected)]
    return {"kl": exact, "kl_grad": gradients[0], "expected_value": expected, "expected_grad": gradients[1]}


Method = Literal["return_alive", "return_all", "trajectory"]


@dataclass(frozen=True)
class Episode:
    """Actions of one episode of the bandit, with its probability and the gradients of its log-probs."""

    probability: Tensor
    rewards: Tensor  # [K], 0 after the last turn
    is_turn: Tensor  # [K]
    scores: Tensor  # [K, A] gradient of the log-prob of the action of turn k w.r.t. the logits of turn k


def list_episodes(logits: Tensor, rewards: Tensor, stop: Tensor) -> Iterator[Episode]:
    """Enumerate the episodes: each turn has its own softmax over the actions, and some actions end the episode."""
    num_turns, num_actions = logits.shape
    probabilities = logits.softmax(dim=1)

    def play(actions: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if actions and (stop[len(actions) - 1, actions[-1]] or len(actions) == num_turns):
            yield actions
        else:
            for action in range(num_actions):
                yield from play((*actions, action))

    for actions in play(()):
        turns, chosen = torch.arange(len(actions)), torch.tensor(actions)
        scores, given, is_turn = torch.zeros_like(logits), logits.new_zeros(num_turns), logits.new_zeros(num_turns)
        scores[turns] = torch.nn.functional.one_hot(chosen, num_actions).to(logits) - probabilities[turns]
        given[turns], is_turn[turns] = rewards[turns, chosen], 1.0
        yield Episode(probabilities[turns, chosen].prod(), given, is_turn, scores)


def turn_bandit(logits, rewards, stop, group_size, method: Method, gamma=1.0) -> Results:
    """Compute the expected return, its gradient, and the expected gradient of a group of samples of the bandit."""
    episodes = list(list_episodes(logits, rewards, stop))
    of_turns, is_turn, scores = (
        torch.stack([getattr(one, name) for one in episodes]) for name in ("rewards", "is_turn", "scores")
    )
    probability = torch.stack([one.probability for one in episodes])
    returns = of_turns @ gamma ** torch.arange(logits.shape[0], dtype=logits.dtype)
    exact = torch.einsum("e,e,eka->ka", probability, returns, scores)
    chosen = torch.tensor(list(itertools.product(range(len(episodes)), repeat=group_size)))  # [groups, group_size]
    flat = chosen.flatten()
    groups = Groups.from_ids(torch.arange(len(chosen)).repeat_interleave(group_size))
    inside, to_go = is_turn[flat], reward_to_go(of_turns[flat], is_turn[flat], gamma)
    if method == "trajectory":
        advantages = rloo(to_go[:, 0], groups).unsqueeze(1) * inside
    else:
        advantages = turn_group(to_go, inside, groups, method)
    per_sample = torch.einsum("nk,nka->nka", advantages, scores[flat])
    gradients = per_sample.view(*chosen.shape, *logits.shape).mean(dim=1)
    weights = probability[chosen].prod(dim=1)
    expected = torch.einsum("g,gka->ka", weights, gradients)
    return {
        "value": probability @ returns,
        "exact_grad": exact,
        "expected_grad": expected,
        "bias": expected - exact,
        "variance": weights @ (gradients - expected).square().sum(dim=(1, 2)),  # summed over the logits
    }
