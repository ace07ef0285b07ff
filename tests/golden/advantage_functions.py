"""Advantages and rewards with the names and parameters of the vectors files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms import aggregation, kl, reward_shaping
from alphaapollo.algorithms.advantages import gae as per_token
from alphaapollo.algorithms.advantages import grpo as per_trajectory
from alphaapollo.algorithms.statistics import center_in_groups, has_variance, reward_to_go, standardize, whiten
from alphaapollo.config.schema import Config
from alphaapollo.trainer.step.shaped_rewards import place_rewards
from alphaapollo.trainer.step.turns import list_trained_turns
from alphaapollo.types import Prompt
from tests.builders import make_trajectory, make_turn
from tests.golden.common import OffMask, Results, groups_of, off_mask_rewards, on_tokens

Index = Sequence[Any]
Level = Literal["sequence", "token"]
Singleton = Literal["zero", "raw"]


def with_singletons(seq_adv: Tensor, raw: Tensor, index: Index, singleton: Singleton) -> Tensor:
    """Replace the result of groups of one by the raw score, which the project does not offer. [N] -> [N]"""
    groups = groups_of(index)
    return torch.where((groups.sizes == 1)[groups.group_index], raw, seq_adv) if singleton == "raw" else seq_adv


def _spread(seq_adv: Tensor, mask: Tensor) -> Results:
    return {"seq_adv": seq_adv, "advantages": on_tokens(seq_adv, mask)}


def gae(
    token_rewards,
    values,
    mask,
    gamma=1.0,
    lam=1.0,
    offmask: OffMask = "drop",
    whiten_adv=False,
    whiten_ddof=1,
    whiten_eps=1e-8,
) -> Results:
    rewards = off_mask_rewards(token_rewards, mask, offmask)
    advantages, returns = per_token.gae(rewards, values, mask, gamma, lam)
    if whiten_adv:
        advantages = whiten(advantages, mask, whiten_ddof, whiten_eps)
    return {"advantages": advantages, "returns": returns}


def grpo(scores, index, mask, ddof=1, eps=1e-6, std_norm=True, singleton: Singleton = "zero") -> Results:
    if not std_norm:
        return dr_grpo(scores, index, mask, singleton)
    advantages = per_trajectory.grpo(scores, groups_of(index), ddof, eps)
    return _spread(with_singletons(advantages, scores, index, singleton), mask)


def dr_grpo(scores, index, mask, singleton: Singleton = "zero") -> Results:
    return _spread(centered(scores, index, singleton), mask)


def centered(scores: Tensor, index: Index, singleton: Singleton) -> Tensor:
    return with_singletons(center_in_groups(scores, groups_of(index)), scores, index, singleton)


def rloo(scores, index, mask, singleton: Singleton = "zero") -> Results:
    advantages = per_trajectory.rloo(scores, groups_of(index))
    return _spread(with_singletons(advantages, scores, index, singleton), mask)


def remax(token_rewards, baselines, mask, gamma=1.0, offmask: OffMask = "drop") -> Results:
    advantages, returns = per_token.remax(off_mask_rewards(token_rewards, mask, offmask), baselines, mask, gamma)
    return {"advantages": advantages, "returns": returns}


def reinforce_pp(
    token_rewards, mask, gamma=1.0, ddof=1, eps=1e-8, eps_inside=True, offmask: OffMask = "drop"
) -> Results:
    returns = reward_to_go(off_mask_rewards(token_rewards, mask, offmask), mask, gamma)
    return {"advantages": whiten(returns, mask, ddof, eps, eps_inside), "returns": returns}


def reinforce_pp_baseline(
    scores, index, mask, level: Level = "sequence", ddof=1, eps=1e-8, singleton: Singleton = "zero"
) -> Results:
    if level == "token":
        return {"advantages": whiten(on_tokens(centered(scores, index, singleton), mask), mask, ddof, eps)}
    if singleton == "raw":
        return _spread(standardize(centered(scores, index, singleton), ddof, eps, eps_in_sqrt=False), mask)
    return _spread(per_token.reinforce_pp_baseline(scores, groups_of(index), ddof, eps), mask)


def magistral(scores, index, mask, minibatch=None, ddof=1, eps=0.0, singleton: Singleton = "zero") -> Results:
    mini_batch_ids = torch.zeros(len(scores), dtype=torch.int64)
    for number, rows in enumerate(minibatch or []):
        mini_batch_ids[list(rows)] = number
    return _spread(per_trajectory.magistral(centered(scores, index, singleton), mini_batch_ids, ddof, eps), mask)


def opo(scores, index, mask, singleton: Singleton = "zero") -> Results:
    advantages = per_trajectory.opo(scores, mask.sum(dim=1), groups_of(index))
    return _spread(with_singletons(advantages, scores, index, singleton), mask)


def gpg(
    scores, index, mask, f_norm: Literal["one", "std"] = "one", ddof=1, eps=0.0, singleton: Singleton = "zero"
) -> Results:
    groups = groups_of(index)
    advantages, alpha = (
        per_trajectory.gpg(scores, groups, f_norm == "std", ddof, eps),
        per_trajectory.gpg_alpha(scores, groups),
    )
    return {**_spread(with_singletons(advantages, alpha * scores, index, singleton), mask), "alpha": alpha}


def gdpo(
    score_matrix,
    index,
    mask,
    weights=None,
    level: Level = "sequence",
    ddof=1,
    eps=1e-4,
    bn_eps=1e-4,
    singleton: Singleton = "zero",
) -> Results:
    chosen = score_matrix.new_tensor([1.0] * score_matrix.shape[1] if weights is None else list(weights))
    summed = per_trajectory.gdpo_sum(score_matrix, groups_of(index), chosen, ddof, eps)
    summed = with_singletons(summed, score_matrix @ chosen, index, singleton)
    if level == "sequence":
        return {"pre_bn": summed, **_spread(standardize(summed, ddof, bn_eps, eps_in_sqrt=False), mask)}
    return {"pre_bn": summed, "advantages": whiten(on_tokens(summed, mask), mask, ddof, bn_eps)}


def passk_leave_one_out(scores, index, mask, std_norm=False, ddof=1, eps=1e-6) -> Results:
    return _spread(per_trajectory.passk_leave_one_out(scores, groups_of(index), std_norm, ddof, eps), mask)


def passk_analytic(correct, index, mask, k) -> Results:
    return _spread(per_trajectory.passk_analytic(correct, groups_of(index), k), mask)


def dynamic_sampling_keep(scores, index, tol=0.0) -> Results:
    members: dict[Any, list[float]] = {}
    for name, score in zip(index, scores.tolist(), strict=True):
        members.setdefault(name, []).append(score)
    return {"value": [has_variance(members[name], tol) for name in index]}


def place_outcome_reward(scores, mask) -> Results:
    placed = torch.zeros_like(mask)
    for row, score, target in zip(mask, scores.tolist(), placed, strict=True):
        positions = row.nonzero().flatten().tolist()  # each action token is a turn after the tokens before it
        if not positions:
            continue  # a trajectory of a run has at least one action token
        turns = [make_turn([0], [0] * (one - before - 1)) for before, one in pairwise([-1, *positions])]
        inside = slice(positions[0], positions[-1] + 1)  # the response of the row
        trajectory, length = make_trajectory(*turns, score=score), inside.stop - inside.start
        trained = list_trained_turns([trajectory], np.array([0, length]))
        rewards = place_rewards([(Prompt(0, "test", "a"), trajectory)], trained, length, Config())
        target[inside] = torch.from_numpy(rewards)
    return {"value": placed}


def soft_overlong_punishment(lengths, max_len, cache, factor=1.0) -> Results:
    return {"value": reward_shaping.soft_overlong_punishment(lengths, max_len, cache, factor)}


def overlong_filter(mask, truncated) -> Results:
    return {"value": aggregation.overlong_filter(mask, truncated)}


def kl_in_reward(token_scores, old_logp, ref_logp, mask, beta, kind="kl") -> Results:
    flat = (matrix.flatten() for matrix in (token_scores, old_logp, ref_logp, mask))
    shaped = kl.subtract_kl(*flat, torch.full((len(mask),), mask.shape[1]), beta, kind)
    return {
        "rewards": shaped.token_rewards.view_as(mask),
        "kl_seq_sum_mean": shaped.kl_per_sequence,
        "kl_token_mean_mean": shaped.kl_per_token,
    }
