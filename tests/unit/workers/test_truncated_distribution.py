"""Losses and estimators with truncated sampling, against all answers of a tiny policy (float64).

An answer is one token, or two if the first one is `CONTINUES`. Its probability is the product of those of its tokens in
the softmax over the tokens that top-p, top-k and min-p keep, which this file truncates and renormalizes on its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import AdvantageInputs, Turns, estimator_names, get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss, policy_loss_names
from alphaapollo.algorithms.sampling import sample_among_kept
from alphaapollo.algorithms.user_functions import is_own
from alphaapollo.config.schema import Actor, Algorithm, RolloutCorrection
from alphaapollo.models.kept_logits import KeptLogits
from alphaapollo.models.lm_head import LmHead, LmHeadInput, LogitLimits, compute_token_stats
from alphaapollo.types import Sampling
from alphaapollo.workers.policy_objective import ObjectiveInputs, compute_policy_objective

VOCABULARY, HIDDEN, TEMPERATURE, CONTINUES = 8, 4, 0.7, 5
LIMITS = LogitLimits(4 * VOCABULARY, 2 * VOCABULARY)  # several blocks, of several chunks each
TRUNCATIONS: dict[str, Any] = {"top_p": 0.8, "top_k": 5, "min_p": 0.05}
SETTINGS = [
    {name: TRUNCATIONS[name] for name in names}
    for size in (1, 2, 3)
    for names in itertools.combinations(TRUNCATIONS, size)
]
LOSSES = [name for name in policy_loss_names() if is_own(get_policy_loss(name).fn)]
ESTIMATORS = [name for name in estimator_names() if is_own(get_estimator(name).fn)]
MEANS_OVER_TOKENS = ("gspo", "gmpo")  # at ratio 1, the gradient of a sequence is the mean over its tokens
UNBIASED = {  # settings with which the mean is a multiple of the gradient of the mean reward; groups have 2 samples
    "reinforce": ({"baseline_decay": 0.9}, 1.0),
    "remax": ({}, 1.0),
    "rloo": ({}, 1.0),
    "turn_group": ({}, 1.0),
    "gae": ({"lam": 1.0, "whiten_advantages": False}, 1.0),  # with any values of the critic
    "turn_gae": ({"lam": 1.0, "whiten_advantages": False}, 1.0),
    "maxrl": ({}, 1.0),  # of the first n - 1 terms
    "dr_grpo": ({}, 1 / 2),  # (n - 1) / n: the mean includes the sample itself
    "gpg": ({}, 1 / 2),  # likewise; alpha is 1 in a batch of one group
}
BIASED = {  # with or without truncation
    **dict.fromkeys(["grpo", "gdpo", "gigpo", "grpo_passk_analytic"], "divides by the deviation in the group"),
    **dict.fromkeys(["magistral", "reinforce_plus_plus", "reinforce_plus_plus_baseline"], "standardizes the batch"),
    "opo": "the sample itself has a weight in the baseline that depends on its length",
}


@dataclass(frozen=True)
class Policy:
    """Logits of the first token, and of the second one."""

    states: Tensor  # [2, H]
    weight: Tensor  # [V, H]
    sets: tuple[list[int], ...]  # kept tokens of each state

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.states, self.weight

    def logprobs(self, state: int) -> Tensor:
        """Log-probs of the kept tokens. [len(set)]"""
        return (self.states[state] @ self.weight[self.sets[state]].T / TEMPERATURE).log_softmax(0)

    def logprob(self, state: int, token: int) -> Tensor:
        return self.logprobs(state)[self.sets[state].index(token)]


def make_policy(truncation: dict[str, Any]) -> Policy:
    generator = torch.Generator().manual_seed(7)
    shapes = (2, HIDDEN), (VOCABULARY, HIDDEN)
    states, weight = (0.7 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    weight[CONTINUES] = states[0]  # a probable first token
    probs = [(state @ weight.T / TEMPERATURE).softmax(0).tolist() for state in states]
    sets = tuple(truncate(one, **truncation) for one in probs)
    assert all(1 < len(one) < VOCABULARY for one in sets) and CONTINUES in sets[0]
    return Policy(states.requires_grad_(), weight.requires_grad_(), sets)


def truncate(probs: Sequence[float], top_p: float = 1.0, top_k: int = VOCABULARY, min_p: float = 0.0) -> list[int]:
    """Tokens with at least min_p of the largest probability; of them the k most probable ones; of them the fewest whose
    share is at least top_p."""
    order = sorted(range(VOCABULARY), key=lambda token: -probs[token])
    kept = [token for token in order if probs[token] >= min_p * probs[order[0]]][:top_k]
    total, mass = sum(probs[token] for token in kept), 0.0
    for count, token in enumerate(kept, start=1):
        mass += probs[token] / total
        if mass >= top_p:
            return sorted(kept[:count])
    return sorted(kept)


Answer = tuple[int, ...]


def list_answers(policy: Policy) -> list[Answer]:
    return [
        (first, *rest)
        for first in policy.sets[0]
        for rest in ([(token,) for token in policy.sets[1]] if first == CONTINUES else [()])
    ]


def probability(policy: Policy, answer: Answer) -> Tensor:
    return sum((policy.logprob(state, token) for state, token in enumerate(answer)), torch.zeros(())).exp()


def reward(answer: Answer, is_binary: bool = False) -> float:
    value = math.sin(7.0 * sum(answer) + len(answer))
    return float(value > 0) if is_binary else value


def head_stats(policy: Policy, answers: Sequence[Answer]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and mask of the product's head, as matrices. [N, 2] each"""
    pairs = [pair for answer in answers for pair in enumerate(answer)]
    states, targets = torch.tensor(pairs).T
    sets = [policy.sets[state] for state, _ in pairs]
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    kept = KeptLogits(offsets, torch.tensor([token for one in sets for token in one], dtype=torch.int32))
    hidden = LmHeadInput(policy.states[states], LmHead(policy.weight))
    stats = compute_token_stats(hidden, targets, TEMPERATURE, needs_entropy=True, limits=LIMITS, kept=kept)
    mask = torch.tensor([[1.0, float(len(answer) == 2)] for answer in answers], dtype=torch.float64)
    columns = (torch.zeros_like(mask).masked_scatter(mask.bool(), flat) for flat in (stats.logprobs, stats.entropy))
    return *columns, mask


def differentiate(value: Tensor, policy: Policy) -> Tensor:
    """Gradient of all parameters. [2 H + V H]"""
    return torch.cat([one.flatten() for one in torch.autograd.grad(value, policy.leaves, retain_graph=True)])


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("truncation", SETTINGS, ids=str)
def test_the_first_ratio_is_1(truncation: dict[str, Any]) -> None:
    """The sampler keeps the enumerated sets, and its log-probs are those of the head."""
    policy, generator = make_policy(truncation), torch.Generator().manual_seed(0)
    sampling = Sampling(1, temperature=TEMPERATURE, returns_kept_tokens=True, **truncation)
    answers = list_answers(policy)
    logprobs, _, _ = head_stats(policy, answers)
    for state, kept in enumerate(policy.sets):
        logits = (policy.states[state] @ policy.weight.T).detach()
        draws = [sample_among_kept(logits, sampling, generator) for _ in range(300)]
        assert {tuple(ids) for _, _, ids in draws} == {tuple(kept)} and {token for token, _, _ in draws} == {*kept}
        for token, logprob, _ in draws:
            row = next(row for row, answer in enumerate(answers) if answer[state : state + 1] == (token,))
            assert math.isclose(math.exp(logprobs[row, state].item() - logprob), 1.0, abs_tol=1e-12)


@pytest.mark.parametrize("truncation", SETTINGS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_losses_are_those_of_the_enumeration(name: str, truncation: dict[str, Any]) -> None:
    """Each answer counts with its probability, and its advantage is its reward. At ratio 1, the gradient is that of the
    mean reward, and of the entropies at the positions of the answers. After a step, it is that of the loss."""
    policy, loss, actor = make_policy(truncation), get_policy_loss(name), Actor(entropy_coeff=0.1)
    answers = list_answers(policy)
    logp, entropies, mask = head_stats(policy, answers)
    old, weights = logp.detach(), torch.stack([probability(policy, answer) for answer in answers]).detach()
    rewards = torch.tensor([reward(answer) for answer in answers], dtype=torch.float64)
    advantages, selected = rewards[:, None] * mask, torch.zeros_like(mask, dtype=torch.bool)
    if loss.select_tokens is not None:
        selected[mask.bool()] = loss.choose_tokens(old[mask.bool()], advantages[mask.bool()], actor)
    inputs = ObjectiveInputs(
        logp=logp,
        old_logp=old,
        advantages=advantages,
        mask=mask,
        rollout_logp=old,
        selected_tokens=selected,
        entropy=entropies,
        **dict.fromkeys(("loss_weights", "sequence_weights", "divergence_weights"), weights),
    )

    def gradient(policy: Policy, logp: Tensor, entropies: Tensor) -> Tensor:
        matrices = replace(inputs, logp=logp, entropy=entropies)
        return differentiate(compute_policy_objective(matrices, actor, loss, RolloutCorrection())[0], policy)

    counted = mask * ~selected if name == "clip_cov" else mask
    if name in MEANS_OVER_TOKENS:
        counted = counted / counted.sum(1, keepdim=True)
    expected = (
        weights[:, None] * (advantages * counted * plain_logprobs(policy) + 0.1 * plain_entropies(policy))
    ).sum()
    assert_equal(gradient(policy, logp, entropies), -differentiate(expected, policy))
    moved = replace(policy, states=(policy.states * 1.1).detach().requires_grad_())
    found = gradient(moved, *head_stats(moved, answers)[:2])
    assert_equal(found, gradient(moved, plain_logprobs(moved), plain_entropies(moved)))


def plain_logprobs(policy: Policy) -> Tensor:
    """Log-probs of the tokens of all answers, 0 after their end. [N, 2]"""
    rows = [[policy.logprob(*pair) for pair in enumerate(answer)] for answer in list_answers(policy)]
    return torch.stack([torch.stack([*row, *[torch.zeros(())] * (2 - len(row))]) for row in rows])


def plain_entropies(policy: Policy) -> Tensor:
    logprobs = [policy.logprobs(state) for state in (0, 1)]
    entropies = torch.stack([-(one.exp() * one).sum() for one in logprobs])
    return torch.stack([entropies * torch.tensor([1.0, len(answer) == 2]) for answer in list_answers(policy)])


def expected_gradient(
    name: str, policy: Policy, settings: dict[str, Any], is_binary: bool = False, samples: int = 2
) -> Tensor:
    """Mean of the estimated gradient over all groups of answers, each of which is a batch."""
    answers, estimator, config = list_answers(policy), get_estimator(name), Algorithm(**settings)
    logprobs, _, mask = head_stats(policy, answers)
    probs = torch.stack([probability(policy, answer) for answer in answers]).detach()
    scores = torch.tensor([reward(answer, is_binary) for answer in answers], dtype=torch.float64)
    weights = torch.zeros_like(logprobs)
    for group in itertools.product(range(len(answers)), repeat=samples):
        rows = torch.tensor(group)
        advantages = estimator(make_inputs(scores[rows], mask[rows]), config).advantages
        weights.index_add_(0, rows, advantages * probs[rows].prod() / samples)
    return differentiate((weights * logprobs).sum(), policy)


def make_inputs(scores: Tensor, mask: Tensor) -> AdvantageInputs:
    """Inputs of one group, in which each token is a turn."""
    ids, groups, lengths = torch.arange(len(scores)), torch.zeros(len(scores), dtype=torch.int64), mask.sum(1).long()
    turns, positions = torch.full(mask.shape, -1), torch.arange(2).expand_as(mask)
    turns[mask.bool()] = torch.arange(int(lengths.sum()))
    return AdvantageInputs(
        token_rewards=scores[:, None] * (positions == lengths[:, None] - 1),
        mask=mask,
        scores=scores,
        group_ids=groups,
        trajectory_ids=ids,
        values=mask * torch.tensor([0.3, -0.4], dtype=torch.float64),  # of the critic, in each state
        greedy_rewards=torch.full_like(scores, 0.6),
        components={"task": scores},
        turns=Turns(turns, ids.repeat_interleave(lengths), positions[mask.bool()]),
        mini_batches=groups,
        baseline=0.2,
    )


def differentiate_mean_reward(policy: Policy, is_binary: bool = False) -> Tensor:
    terms = [reward(answer, is_binary) * probability(policy, answer) for answer in list_answers(policy)]
    return differentiate(torch.stack(terms).sum(), policy)


@pytest.mark.parametrize("truncation", SETTINGS, ids=str)
@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_estimators_estimate_the_gradient_of_the_mean_reward(name: str, truncation: dict[str, Any]) -> None:
    policy, (settings, factor), is_binary = make_policy(truncation), UNBIASED[name], name == "maxrl"
    expected = factor * differentiate_mean_reward(policy, is_binary)
    assert_equal(expected_gradient(name, policy, settings, is_binary), expected)


@pytest.mark.parametrize("truncation", SETTINGS, ids=str)
def test_grpo_passk_estimates_the_gradient_of_the_best_reward(truncation: dict[str, Any]) -> None:
    policy = make_policy(truncation)
    pairs = itertools.product(list_answers(policy), repeat=2)
    best = [max(reward(a), reward(b)) * probability(policy, a) * probability(policy, b) for a, b in pairs]
    expected = differentiate(torch.stack(best).sum(), policy)
    assert_equal(2 * expected_gradient("grpo_passk", policy, {}), expected)


@pytest.mark.parametrize("name", BIASED)
def test_other_estimators_are_no_constant_multiple_of_it(name: str) -> None:
    is_binary, settings = name == "grpo_passk_analytic", {"passk_k": 2}
    policies = [make_policy({"top_p": 0.8, "top_k": top_k}) for top_k in (3, 5)]
    found = torch.cat([expected_gradient(name, policy, settings, is_binary, samples=3) for policy in policies])
    exact = torch.cat([differentiate_mean_reward(policy, is_binary) for policy in policies])
    assert found.any() and torch.cosine_similarity(found, exact, dim=0) < 0.9999


def test_every_estimator_is_named() -> None:
    assert {*UNBIASED, *BIASED, "grpo_passk", "none"} == {*ESTIMATORS}
