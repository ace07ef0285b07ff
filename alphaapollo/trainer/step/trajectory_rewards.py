"""What a trajectory is worth to the estimators: its score, shaped by its length, and the rewards of its turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from alphaapollo.algorithms.reward_shaping import length_budget_exact, length_budget_max, soft_overlong_punishment
from alphaapollo.config.schema import Actor, Algorithm, LengthBudget
from alphaapollo.types import Prompt, Trajectory, Turn

BUDGET = "length_budget"
"""The entry of a row's extra_info that algorithm.length_budget reads: tokens."""


def outcome_rewards(
    members: Sequence[tuple[Prompt, Trajectory]], algorithm: Algorithm, max_length: int
) -> torch.Tensor:
    """Each trajectory's score with DAPO's overlong penalty and L1's length budget, where they are on. float64 [N]

    max_length: of a response, in tokens.
    """
    rewards = torch.tensor([trajectory.score.reward for _, trajectory in members], dtype=torch.float64)
    if algorithm.length_budget.mode:
        lengths = torch.tensor([trajectory.num_tokens for _, trajectory in members], dtype=torch.float64)
        budgets = torch.tensor([float(prompt.extra_info[BUDGET]) for prompt, _ in members], dtype=torch.float64)
        rewards = _to_budget(rewards, lengths, budgets, algorithm.length_budget)
    if algorithm.overlong_penalty.enable:
        penalty = algorithm.overlong_penalty
        lengths = torch.tensor([trajectory.response_length for _, trajectory in members], dtype=torch.float64)
        cache = penalty.cache or max(1, max_length // 5)
        rewards = rewards + soft_overlong_punishment(lengths, max_length, cache, penalty.factor)
    return rewards


def _to_budget(
    rewards: torch.Tensor, lengths: torch.Tensor, budgets: torch.Tensor, config: LengthBudget
) -> torch.Tensor:
    if config.mode == "exact":
        return length_budget_exact(rewards, lengths, budgets, config.coef)
    return length_budget_max(rewards, lengths, budgets, config.coef, config.slack)


def invalid_cost(actor: Actor) -> float:
    """Of a turn whose action could not be read."""
    return actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0


def turn_reward(turn: Turn, penalty: float) -> float:
    """The environment's step reward; `penalty` is the cost of an invalid action."""
    return turn.reward - (0.0 if turn.valid else penalty)


def check_length_budgets(prompts: Iterable[Prompt]) -> None:
    """Start-up check for algorithm.length_budget (ValueError: names the first row without a budget)."""
    for prompt in prompts:
        budget = prompt.extra_info.get(BUDGET)
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
            raise ValueError(
                f"algorithm.length_budget needs a number of tokens in every row's extra_info.{BUDGET}; row {prompt.id} "
                f"has {budget!r}. Add it (and say it in the prompt), or leave algorithm.length_budget.mode out."
            )
