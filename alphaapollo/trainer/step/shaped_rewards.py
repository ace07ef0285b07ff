"""Rewards of trajectories before advantages are computed: outcomes with penalties for their length, step rewards,
their positions in the tokens, and named components."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.reward_shaping import apply_length_budget, soft_overlong_punishment
from alphaapollo.config.schema import Actor, Config
from alphaapollo.trainer.step.turns import TrainedTurn
from alphaapollo.types import Prompt, Trajectory, TrajectoryGroup, Turn

PromptTrajectory = tuple[Prompt, Trajectory]
BUDGET = "length_budget"
"""Key in extra_info that algorithm.length_budget reads: a number of tokens."""


def shape_outcome_rewards(pairs: Sequence[PromptTrajectory], config: Config) -> Tensor:
    """Return the reward of each trajectory with DAPO's overlong penalty and L1's length budget, if enabled.

    pairs: N prompts with one of their trajectories. Returns float64 [N].
    """
    algorithm, max_length = config.algorithm, config.data.max_response_length
    rewards = torch.tensor([trajectory.score.reward for _, trajectory in pairs], dtype=torch.float64)
    if (budget := algorithm.length_budget).mode:
        # A prompt's budget counts sampled tokens, without observations.
        lengths = torch.tensor([trajectory.num_tokens for _, trajectory in pairs], dtype=torch.float64)
        budgets = torch.tensor([float(prompt.extra_info[BUDGET]) for prompt, _ in pairs], dtype=torch.float64)
        rewards = apply_length_budget(rewards, lengths, budgets, budget.mode, budget.coef)
    if (penalty := algorithm.overlong_penalty).enable:
        # Like max_length, the penalty counts observations, too.
        lengths = torch.tensor([trajectory.response_length for _, trajectory in pairs], dtype=torch.float64)
        cache = penalty.cache or max(1, max_length // 5)
        rewards = rewards + soft_overlong_punishment(lengths, max_length, cache, penalty.factor)
    return rewards


def check_prompts_have_length_budgets(prompts: Iterable[Prompt]) -> None:
    """Raise ValueError for a prompt without a token budget in extra_info, which algorithm.length_budget needs."""
    for prompt in prompts:
        budget = prompt.extra_info.get(BUDGET)
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
            raise ValueError(
                f"algorithm.length_budget needs a number of tokens in extra_info.{BUDGET} of every row; row "
                f"{prompt.id} has {budget!r}. Add the number and mention it in the prompt, or set "
                "algorithm.length_budget.mode=null."
            )


def compute_turn_reward(turn: Turn, actor: Actor) -> float:
    """Return the environment's step reward, minus the penalty if the action could not be parsed."""
    return turn.reward - (0.0 if turn.valid else get_invalid_action_penalty(actor))


def get_invalid_action_penalty(actor: Actor) -> float:
    return actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0


def place_rewards(
    pairs: Sequence[PromptTrajectory], turns: Sequence[list[TrainedTurn]], num_tokens: int, config: Config
) -> np.ndarray:
    """Return token rewards [n], each on the last action token of a turn.

    A step reward and the invalid-action penalty are on their turn. A reward of an agent's turn that is not trained on
    is on the last trained turn before it, else on the first trained turn. The outcome's reward is on the last one.

    Args:
        pairs: N prompts with one of their trajectories. turns: of each trajectory.
        num_tokens: n.
    """
    rewards, outcomes = np.zeros(num_tokens), shape_outcome_rewards(pairs, config).tolist()
    actor = config.actor_rollout_ref.actor
    for (_, trajectory), trained, outcome in zip(pairs, turns, outcomes, strict=True):
        for turn, _, end in trained:
            rewards[end - 1] += compute_turn_reward(turn, actor)
        for turn in trajectory.turns[len(trained) :]:  # turns that are not trained on
            num_earlier = bisect(trained, turn.answer_number, key=lambda each: each.turn.answer_number)
            rewards[trained[max(0, num_earlier - 1)].end - 1] += turn.reward
        rewards[trained[-1].end - 1] += outcome
    return rewards


def sum_shaped_rewards(pairs: Sequence[PromptTrajectory], config: Config) -> Tensor:
    """Return the shaped reward of each of N trajectories, with its step rewards and penalties. float64 [N]"""
    actor = config.actor_rollout_ref.actor
    steps = [sum(compute_turn_reward(turn, actor) for turn in trajectory.turns) for _, trajectory in pairs]
    return shape_outcome_rewards(pairs, config) + torch.tensor(steps, dtype=torch.float64)


def compute_greedy_rewards(groups: Sequence[TrajectoryGroup], config: Config, group_ids: Tensor) -> Tensor | None:
    """Return the reward of the greedy rollout of each row's group (ReMax), [B]; None without greedy rollouts."""
    baselines = [(group.prompt, group.baseline) for group in groups if group.baseline is not None]
    return sum_shaped_rewards(baselines, config)[group_ids] if baselines else None


def compute_length_penalty(trajectories: Sequence[Trajectory], scores: Tensor, config: Config) -> float | None:
    """Compute by how much the overlong penalty and the length budget reduce the mean reward; None without them.

    scores: [N], reward of each trajectory with these penalties.
    """
    algorithm, penalty = config.algorithm, get_invalid_action_penalty(config.actor_rollout_ref.actor)
    if not algorithm.overlong_penalty.enable and not algorithm.length_budget.mode:
        return None
    unshaped_sum = sum(each.reward - penalty * sum(not turn.valid for turn in each.turns) for each in trajectories)
    return unshaped_sum / len(trajectories) - float(scores.mean())


def get_reward_components(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return the value of each reward component per trajectory, [N]; NaN if the trajectory does not have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.score.components})
    values = {name: [trajectory.score.component(name) for trajectory in trajectories] for name in names}
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
