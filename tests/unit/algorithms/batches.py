"""Batches for advantages and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import AdvantageInputs, Turns, estimator_names, get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from alphaapollo.config.schema import Actor

GROUP_ESTIMATORS = [name for name in estimator_names() if get_estimator(name).group]


def make_advantage_inputs(
    scores: Sequence[float] | Tensor, groups: Sequence[int] | Tensor, mask: Tensor | None = None, **fields: Any
) -> AdvantageInputs:
    """One row per trajectory, of one token unless `mask` is given. The score is on the last action token."""
    scores = torch.as_tensor(scores, dtype=torch.float64 if mask is None else mask.dtype)
    mask = torch.ones_like(scores).unsqueeze(1) if mask is None else mask
    from_end = mask.flip(1).cumsum(1).flip(1)
    rewards = scores.unsqueeze(1) * ((from_end == 1) & (mask > 0))
    ids = torch.arange(len(scores))
    defaults = {"token_rewards": rewards, "trajectory_ids": ids, "mini_batches": torch.zeros_like(ids)}
    return AdvantageInputs(mask=mask, scores=scores, group_ids=torch.as_tensor(groups), **(defaults | fields))


def make_complete_inputs(
    scores: Sequence[float], groups: Sequence[int], mask: Tensor, owners: Sequence[int] | None = None
) -> AdvantageInputs:
    """Inputs of any estimator. Each row is one turn, and all turns of a group start from the same state.

    owners: trajectory of each row.
    """
    inputs = make_advantage_inputs(scores, groups, mask)
    owner = torch.arange(len(mask)) if owners is None else torch.tensor(owners)
    turn_of_token = torch.where(mask.bool(), torch.arange(len(mask)).unsqueeze(1), -1)
    return replace(
        inputs,
        trajectory_ids=owner,
        values=torch.zeros_like(mask),
        greedy_rewards=torch.zeros_like(inputs.scores),
        components={"accuracy": inputs.scores},
        turns=Turns(turn_of_token, trajectory_ids=owner, anchor_ids=inputs.group_ids),
    )


def per_turn(batch: AdvantageInputs, matrix: Tensor) -> list[float]:
    """Value of each turn, which is equal on its tokens. Other tokens have 0."""
    assert batch.turns is not None and not matrix[~batch.mask.bool()].any()
    values = [matrix[batch.turns.turn_of_token == turn].unique() for turn in range(len(batch.turns.trajectory_ids))]
    assert all(len(value) == 1 for value in values)
    return [value.item() for value in values]


def with_choice(batch: PolicyLossInputs, loss: PolicyLoss, actor: Actor) -> PolicyLossInputs:
    """The batch as a complete mini-batch, with the tokens that the loss selects, if it does."""
    if loss.select_tokens is None:
        return batch
    is_action = batch.mask.bool()
    chosen = torch.zeros_like(is_action)
    chosen[is_action] = loss.select_tokens(batch.old_logp[is_action], batch.advantages[is_action], actor)
    return replace(batch, selected_tokens=chosen)
