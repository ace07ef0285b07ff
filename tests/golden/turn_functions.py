"""Credit per turn with the names and parameters of the vectors files.

`turn_bandit` computes the expected gradient of an estimator by enumeration. Its advantages come from the project's own
functions, except for the biased methods `per_turn_sum` and `per_turn_sum_loo`, which the project does not offer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import Turns
from alphaapollo.algorithms.advantages.grpo import rloo
from alphaapollo.algorithms.advantages.turns import turn_gae as turn_gae_advantages
from alphaapollo.algorithms.advantages.turns import turn_group
from alphaapollo.algorithms.statistics import Groups, reward_to_go
from tests.golden.common import OffMask, Results, groups_of, off_mask_rewards

Method = Literal["per_turn_sum", "per_turn_sum_loo", "return_alive", "return_all", "trajectory"]
Singleton = Literal["zero", "raw"]


def turn_gae(
    token_rewards, values, mask, turn_ids=None, gamma=1.0, lam=1.0, offmask: OffMask = "drop", bootstrap=None
) -> Results:
    """bootstrap: [B] value after the last turn, which the project does not offer. It is worth as much as gamma times
    this reward in the last turn."""
    turns = number_turns(mask, turn_ids)
    rewards = off_mask_rewards(token_rewards, mask, offmask)
    if bootstrap is not None:
        last = torch.where(mask.bool(), torch.arange(mask.shape[1]), -1).amax(dim=1)
        rewards = rewards.clone()
        rewards[last >= 0, last[last >= 0]] += gamma * bootstrap[last >= 0]
    advantages, returns = turn_gae_advantages(rewards, values, turns, gamma, lam)
    previous = torch.nn.functional.pad(turns.turn_of_token, (1, 0), value=-1).cummax(dim=1).values[:, :-1]
    return {"advantages": advantages, "returns": returns, "first_token": (turns.turn_of_token > previous).to(mask)}


def number_turns(mask: Tensor, turn_ids: Tensor | None) -> Turns:
    """Number the turns of rows that are one trajectory each. turn_ids: increasing per row; None = runs of 1 in the
    mask."""
    if turn_ids is None:
        starts = mask.bool() & ~torch.nn.functional.pad(mask.bool(), (1, 0))[:, :-1]
        turn_ids = starts.cumsum(dim=1)
    rows = torch.arange(len(mask)).unsqueeze(1).expand_as(mask)
    inside = mask.bool()
    pairs = torch.stack([rows[inside], turn_ids[inside].to(torch.int64)], dim=1)
    unique, numbers = torch.unique(pairs, dim=0, return_inverse=True)
    turn_of_token = torch.full(mask.shape, -1)
    turn_of_token[inside] = numbers
    return Turns(turn_of_token, unique[:, 0], torch.arange(len(unique)))


def turn_group_advantage(
    turn_rewards,
    n_turns,
    index,
    method: Method = "return_all",
    gamma=1.0,
    singleton: Singleton = "raw",
    turn_ids=None,
    mask=None,
) -> Results:
    is_turn = (torch.arange(turn_rewards.shape[1]) < n_turns.unsqueeze(1)).to(turn_rewards)
    advantages = compute_turn_advantages(turn_rewards * is_turn, is_turn, groups_of(index), method, gamma, singleton)
    if mask is None:
        return {"turn_adv": advantages}
    turns = number_turns(mask, turn_ids)
    return {"turn_adv": advantages, "advantages": turns.expand_to_tokens(advantages[is_turn.bool()])}


def compute_turn_advantages(
    rewards: Tensor, is_turn: Tensor, groups: Groups, method: Method, gamma: float, singleton: Singleton
) -> Tensor:
    """rewards, is_turn: [N, K]. Returns [N, K]."""
    returns = reward_to_go(rewards, is_turn, gamma)
    if method == "trajectory":
        returns = returns[:, :1] * is_turn
        advantages = rloo(returns[:, 0], groups).unsqueeze(1) * is_turn
    elif method == "return_all" or method == "return_alive":
        advantages = turn_group(returns, is_turn, groups, method)
        if singleton == "zero":
            advantages = torch.where(count_compared(is_turn, groups) == 1, 0.0, advantages)
    else:
        return reward_to_go(center_per_turn(rewards, is_turn, groups, method, singleton), is_turn, gamma)
    is_alone = (groups.sizes == 1)[groups.group_index].unsqueeze(1)  # the project gives such a group no advantage
    return torch.where(is_alone & (singleton == "raw"), returns, advantages)


def count_compared(is_turn: Tensor, groups: Groups) -> Tensor:
    """Number of trajectories of the group, with the own one, that reach each turn. [N, K] -> [N, K]"""
    counts = is_turn.new_zeros(len(groups.sizes), is_turn.shape[1]).index_add_(0, groups.group_index, is_turn)
    return counts[groups.group_index]


def center_per_turn(rewards: Tensor, is_turn: Tensor, groups: Groups, method: Method, singleton: Singleton) -> Tensor:
    """Subtract from each reward the mean over the trajectories that have this turn, which makes the sum over the
    remaining turns biased (verl issue 7244). [N, K]"""
    totals = is_turn.new_zeros(len(groups.sizes), is_turn.shape[1]).index_add_(0, groups.group_index, rewards)
    totals, counts = totals[groups.group_index], count_compared(is_turn, groups)
    if method == "per_turn_sum_loo":
        others = (totals - rewards) / (counts - 1).clamp(min=1)
        raw = rewards if singleton == "raw" else torch.zeros_like(rewards)
        return torch.where(counts > 1, rewards - others, raw) * is_turn
    return (rewards - totals / counts.clamp(min=1)) * is_turn


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
        turns = torch.arange(len(actions))
        chosen = torch.tensor(actions)
        scores, given, is_turn = torch.zeros_like(logits), logits.new_zeros(num_turns), logits.new_zeros(num_turns)
        scores[turns] = torch.nn.functional.one_hot(chosen, num_actions).to(logits) - probabilities[turns]
        given[turns], is_turn[turns] = rewards[turns, chosen], 1.0
        yield Episode(probabilities[turns, chosen].prod(), given, is_turn, scores)


def turn_bandit(logits, rewards, stop, group_size, method: Method, gamma=1.0, singleton: Singleton = "raw") -> Results:
    """Compute the expected return, its gradient, and the expected gradient of a group of samples of the bandit."""
    episodes = list(list_episodes(logits, rewards, stop))
    samples = [torch.stack([getattr(one, name) for one in episodes]) for name in ("rewards", "is_turn", "scores")]
    probability = torch.stack([one.probability for one in episodes])
    discounts = gamma ** torch.arange(logits.shape[0], dtype=logits.dtype)
    returns = samples[0] @ discounts
    exact = torch.einsum("e,e,eka->ka", probability, returns, samples[2])
    chosen = torch.tensor(list(itertools.product(range(len(episodes)), repeat=group_size)))  # [groups, group_size]
    flat = chosen.flatten()
    groups = Groups.from_ids(torch.arange(len(chosen)).repeat_interleave(group_size))
    advantages = compute_turn_advantages(samples[0][flat], samples[1][flat], groups, method, gamma, singleton)
    weights = probability[chosen].prod(dim=1)
    per_sample = torch.einsum("nk,nka->nka", advantages, samples[2][flat])
    gradients = per_sample.view(*chosen.shape, *logits.shape).mean(dim=1)
    expected = torch.einsum("g,gka->ka", weights, gradients)
    return {
        "value": probability @ returns,
        "exact_grad": exact,
        "expected_grad": expected,
        "bias": expected - exact,
        "variance": weights @ (gradients - expected).square().sum(dim=(1, 2)),  # summed over the logits
    }
