"""Samples to train on, with a reward for each turn.

The columns of a recording have n values, one for each token that the model sampled, in the order of the rows (token
sequences) of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

Config = SimpleNamespace  # of the run
Recorded = Any  # group, trajectory, turn or row of a recording
FAILED = ("grader_failed", "environment_failed")


class NotCovered(Exception):
    """The reference does not know a setting of the run."""


@dataclass
class Sample:
    """Trajectory that is trained on."""

    group: int  # number of its prompt
    trajectory: Recorded
    rows: list[Recorded]
    row_numbers: list[int]  # among the rows of all samples
    tokens: slice  # its sampled tokens among the n of the columns
    turns: list[np.ndarray]  # positions of the tokens of each turn, among the n, in the order of sampling
    rewards: np.ndarray  # [turns], the outcome's reward is on the last one
    states: list[object]  # state of the environment before each turn
    total: float = 0.0  # sum of the rewards, before a KL

    @property
    def in_time(self) -> np.ndarray:
        """Positions of its tokens in the order of sampling."""
        return np.concatenate(self.turns)


@dataclass
class Batch:
    samples: list[Sample]
    others: list[tuple[int, Recorded, float]]  # group, trajectory and reward of samples that are only compared with
    greedy: dict[int, float]  # group -> reward of its greedy answer
    num_tokens: int


def to_namespace(value: Any) -> Any:
    """Convert nested dicts to objects with attributes: config["a"]["b"] is config.a.b."""
    return SimpleNamespace(**{k: to_namespace(v) for k, v in value.items()}) if isinstance(value, dict) else value


def outcome_reward(prompt: Recorded, trajectory: Recorded, config: Config) -> float:
    """Reward of the reward function, with the penalties for length."""
    reward, algorithm, limit = trajectory.score.reward, config.algorithm, config.data.max_response_length
    if algorithm.length_budget.mode:  # arXiv 2503.04697, section 3
        sampled = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        over = algorithm.length_budget.coef * (float(prompt.extra_info["length_budget"]) - sampled)
        exact = algorithm.length_budget.mode == "exact"
        reward = reward - abs(over) if exact else reward * min(max(over + 0.5, 0.0), 1.0)
    if algorithm.overlong_penalty.enable:  # arXiv 2503.14476, Eq. 13
        cache = algorithm.overlong_penalty.cache or max(1, limit // 5)
        over = (max((row.response_length for row in trajectory.rows), default=0) - (limit - cache)) / cache
        reward -= algorithm.overlong_penalty.factor * min(max(over, 0.0), 1.0)
    return float(reward)


def turn_reward(turn: Recorded, config: Config) -> float:
    actor = config.actor_rollout_ref.actor
    invalid = actor.use_invalid_action_penalty and not turn.valid
    return float(turn.reward - (actor.invalid_action_penalty_coef if invalid else 0.0))


def choose(rewards: list[float], filtration: Config) -> list[int]:
    """Choose the samples of a group to train on (PODS, arXiv 2504.13818, section 3)."""
    order, size = sorted(range(len(rewards)), key=lambda i: rewards[i]), min(filtration.size, len(rewards))
    splits = [[*order[:low], *order[len(order) - (size - low) :]] for low in range(size + 1)]  # lowest and highest
    if filtration.method == "extremes":
        return sorted(splits[size // 2])
    if filtration.method != "max_variance":
        raise NotCovered("random samples of a group (algorithm.filtration.method=random)")
    variances = [float(np.var([rewards[i] for i in split])) for split in splits]
    best = [low for low in range(size + 1) if variances[low] >= max(variances) * (1 - 1e-9)]
    return sorted(splits[min(best, key=lambda low: abs(low - size / 2))])


def build_batch(groups: list[Recorded], config: Config) -> Batch:
    """Select the trajectories to train on, and place their rewards."""
    batch, filtration, row_number = Batch([], [], {}, 0), config.algorithm.filtration, 0
    for number, group in enumerate(groups):
        usable = [t for t in group.trajectories if t.rows and t.score.outcome not in FAILED]
        totals = [
            outcome_reward(group.prompt, t, config) + sum(turn_reward(x, config) for x in t.turns) for t in usable
        ]
        selects = filtration.method in ("max_variance", "extremes", "random")
        chosen = choose(totals, filtration) if selects else [*range(len(usable))]
        if group.baseline is not None:
            of_turns = sum(turn_reward(turn, config) for turn in group.baseline.turns)
            batch.greedy[number] = outcome_reward(group.prompt, group.baseline, config) + of_turns
        if selects and filtration.baseline == "all":
            batch.others += [(number, t, totals[i]) for i, t in enumerate(usable) if i not in chosen]
        for trajectory in (usable[i] for i in chosen):
            sample = place_rewards(number, trajectory, batch.num_tokens, config)
            sample.rewards[-1] += outcome_reward(group.prompt, trajectory, config)
            sample.total = float(sample.rewards.sum())
            sample.row_numbers = [*range(row_number, row_number + len(trajectory.rows))]
            batch.num_tokens, row_number = sample.tokens.stop, row_number + len(trajectory.rows)
            batch.samples.append(sample)
    return batch


def place_rewards(group: int, trajectory: Recorded, first: int, config: Config) -> Sample:
    """Find the tokens and rewards of the turns of a trajectory, whose first token is `first` among the n."""
    trained, start = [], first  # (turn, positions of its tokens)
    for row in trajectory.rows:
        is_action = np.asarray(row.action_mask, dtype=bool)
        position = start + np.cumsum(is_action) - 1
        turns = trajectory.turns[row.first_turn : row.first_turn + len(row.turn_ends)]
        for turn, last in zip(turns, row.turn_ends, strict=True):
            trained.append((turn, position[last + 1 - len(turn.completion.token_ids) : last + 1]))
        start += int(is_action.sum())
    trained.sort(key=lambda pair: pair[0].answer_number)
    rewards = np.array([turn_reward(turn, config) for turn, _ in trained])
    for turn in trajectory.turns[len(trained) :]:  # not trained on: its reward belongs to the turn before it
        earlier = sum(one.answer_number <= turn.answer_number for one, _ in trained)
        rewards[max(0, earlier - 1)] += turn.reward
    states = [turn.info.get("state") for turn, _ in trained]
    states = [tuple(trained[i][0].context_ids) if s is None else repr(s) for i, s in enumerate(states)]
    positions = [positions for _, positions in trained]
    return Sample(group, trajectory, [*trajectory.rows], [], slice(first, start), positions, rewards, states)
