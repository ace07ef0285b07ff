"""Metrics of one iteration: rollouts and speed. config/metrics.yaml explains each metric."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from alphaapollo.observability.sample_metrics import CORRECT_ACCURACY
from alphaapollo.types import EpisodeEnd, JudgeUsage, Outcome, Trajectory, TrajectoryGroup, Turn

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class _TrajectoryTable:
    """Numbers of N trajectories that several metrics use. Arrays [N]."""

    trajectories: list[Trajectory]
    is_scored: np.ndarray  # False if the grader or the environment failed
    lengths: np.ndarray  # sampled tokens
    rewards: np.ndarray
    accuracies: np.ndarray  # NaN if unknown

    @property
    def has_accuracy(self) -> bool:
        """Whether the accuracy of each scored trajectory is known."""
        return not np.isnan(self.accuracies[self.is_scored]).any()

    @classmethod
    def from_trajectories(cls, trajectories: list[Trajectory]) -> _TrajectoryTable:
        return cls(
            trajectories,
            np.array([not sample.score.outcome.failed for sample in trajectories], dtype=bool),
            np.array([sample.num_tokens for sample in trajectories]),
            np.array([sample.reward for sample in trajectories]),
            np.array([sample.accuracy for sample in trajectories], dtype=float),
        )


def compute_rollout_metrics(
    generated: Sequence[TrajectoryGroup], trained: Sequence[TrajectoryGroup], rounds: int, generation_seconds: float
) -> dict[str, float]:
    """Compute metrics of all `generated` groups, `trained` or not. Reward metrics exclude failed trajectories."""
    trajectories = [trajectory for group in generated for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    table = _TrajectoryTable.from_trajectories(trajectories)
    num_tokens = int(table.lengths.sum())
    logprob_sum = sum(turn.completion.logprob_sum for turn in turns)
    prompt_tokens = sum(sum(trajectory.prompt_lengths) for trajectory in trajectories)
    metrics = {
        "rollout/trajectories": float(len(trajectories)),
        "rollout/tokens": float(num_tokens),
        "rollout/tokens_per_second": num_tokens / generation_seconds if generation_seconds else 0.0,
        "rollout/entropy": -logprob_sum / max(1, num_tokens),
        "num_turns/mean": len(turns) / len(trajectories),
        "rollout/prompt_tokens_cached": sum(turn.completion.num_cached_tokens for turn in turns)
        / max(1, prompt_tokens),
        "rollout/rounds": float(rounds),
        "rollout/groups_kept": float(len(trained)),
    }
    outcomes = Counter(sample.score.outcome for sample in trajectories)
    ends = Counter(sample.end for sample in trajectories)
    metrics |= {f"outcome/{outcome}": outcomes[outcome] / len(trajectories) for outcome in Outcome}
    metrics["outcome/failed"] = float((~table.is_scored).mean())
    metrics |= {f"end/{end}": ends[end] / len(trajectories) for end in EpisodeEnd}
    baselines = [group.baseline for group in generated if group.baseline is not None]
    if baselines:
        baseline_table = _TrajectoryTable.from_trajectories(baselines)
        metrics["baseline/failed"] = float((~baseline_table.is_scored).mean())
        metrics |= _compute_reward_metrics(baseline_table, "baseline", "baseline")
    return (
        metrics
        | _compute_length_metrics(table)
        | _compute_tool_metrics(turns)
        | _compute_agent_metrics(trajectories)
        | _compute_judge_metrics(trajectories)
        | _compute_group_metrics(generated, trained, table)
        | _compute_reward_metrics(table, "critic/score", "reward")
        | _compute_metrics_by_source(generated)
    )


def _compute_length_metrics(table: _TrajectoryTable) -> dict[str, float]:
    """Compute statistics of the number of sampled tokens and of the length of the first prompt, over trajectories."""
    quantiles = np.quantile(table.lengths, list(QUANTILES.values()))
    metrics = {
        "response_length/mean": float(table.lengths.mean()),
        "response_length/max": float(table.lengths.max()),
        "response_length/clip_ratio": sum(sample.truncated for sample in table.trajectories) / len(table.trajectories),
    }
    metrics |= {f"response_length/{name}": float(value) for name, value in zip(QUANTILES, quantiles, strict=True)}
    is_right = table.accuracies >= CORRECT_ACCURACY
    for name, is_chosen in (("right", is_right), ("wrong", ~is_right)):
        lengths = table.lengths[table.is_scored & is_chosen]
        if table.has_accuracy and len(lengths):
            metrics[f"response_length/{name}"] = float(lengths.mean())
    episodes = [sample.turns for sample in table.trajectories if sample.turns]
    first_lengths = [len(min(turns, key=lambda turn: turn.answer_number).context_ids) for turns in episodes]
    if first_lengths:
        metrics |= {"prompt_length/mean": float(np.mean(first_lengths)), "prompt_length/max": float(max(first_lengths))}
    return metrics


def _compute_tool_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    """Compute the number of tool calls per turn, the share of calls with each status, and the share of invalid turns.

    A turn is invalid if the model's action could not be parsed or its tool calls were refused.
    """
    if not turns:
        return {}
    calls = [call for turn in turns for call in turn.info.get("tool_calls", ())]
    metrics = {
        "turn/invalid": sum(not turn.valid for turn in turns) / len(turns),
        "tool/calls_per_turn": len(calls) / len(turns),
    }
    if calls:
        metrics["tool/seconds"] = float(np.mean([call["seconds"] for call in calls]))
    for status, count in Counter(call["status"] for call in calls).items():
        metrics[f"tool/{status}"] = count / len(calls)
    return metrics


def _compute_agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute means over trajectories of agents: rows besides the first, tokens reused instead of rendered, requests
    with a rewritten history, constrained and refused requests, programs that failed after an answer, turns that are not
    trained on, and rewards of single requests by role."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns if "request" in turn.info]
    if not turns:
        return {}
    totals = {
        "branches": sum(max(0, len(trajectory.rows) - 1) for trajectory in trajectories),
        "reused_tokens": sum(turn.info.get("reused_tokens", 0) for turn in turns),
        "rerendered": sum("difference" in turn.info for turn in turns),
        "constrained": sum("constrained" in turn.info for turn in turns),
        "refused": sum(turn.info.get("refused", 0) for turn in turns),
        "errors": sum("error" in turn.info for turn in turns),
        "untrained_turns": sum(
            len(sample.turns) - sum(len(row.turn_ends) for row in sample.rows) for sample in trajectories if sample.rows
        ),
    }
    for turn in turns:
        if "role" in turn.info:
            name = f"reward/{turn.info['role']}"
            totals[name] = totals.get(name, 0.0) + turn.reward
    return {f"agent/{name}": value / len(trajectories) for name, value in totals.items()}


def _compute_judge_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the number of judgements, the share of them from the cache, their mean time until the verdict, and the
    number of reward components that were left out because they are NaN or infinite."""
    total = sum((sample.score.judge_usage for sample in trajectories), JudgeUsage())
    skipped = sum(len(sample.score.skipped_components) for sample in trajectories)
    metrics = {"reward/skipped_components": float(skipped)} if skipped else {}
    if not total.judgements:
        return metrics
    return metrics | {
        "judge/judgements": float(total.judgements),
        "judge/cache_hit_rate": total.cached / total.judgements,
        "judge/seconds": total.seconds / total.judgements,
    }


def _compute_group_metrics(
    generated: Sequence[TrajectoryGroup], trained: Sequence[TrajectoryGroup], table: _TrajectoryTable
) -> dict[str, float]:
    """Compute the share of generated groups that are all right, all wrong, mixed, without reward variance, or dropped.

    Failed samples are ignored. A group with some failed samples also counts as `partial`. The first three are left out
    if an accuracy is unknown.
    """
    names = ("all_right", "all_wrong", "mixed") if table.has_accuracy else ()
    counts = Counter({"dropped": len(generated) - len(trained)})
    members = list(zip(table.is_scored, table.accuracies >= CORRECT_ACCURACY, table.rewards.tolist(), strict=True))
    for start, end in pairwise(accumulate((len(group.trajectories) for group in generated), initial=0)):
        scored = [(is_right, reward) for is_scored, is_right, reward in members[start:end] if is_scored]
        right, rewards = [is_right for is_right, _ in scored], [reward for _, reward in scored]
        counts["all_right"] += bool(right) and all(right)
        counts["all_wrong"] += bool(right) and not any(right)
        counts["mixed"] += any(right) and not all(right)
        counts["zero_variance"] += end - start > 1 and bool(rewards) and max(rewards) == min(rewards)
        counts["partial"] += 0 < len(scored) < end - start
    return {f"groups/{name}": counts[name] / len(generated) for name in (*names, "zero_variance", "partial", "dropped")}


def _compute_reward_metrics(table: _TrajectoryTable, reward_prefix: str, accuracy_prefix: str) -> dict[str, float]:
    """Compute statistics of the reward, the accuracy and each reward component. Failed trajectories are ignored."""
    if not table.is_scored.any():
        return {}
    rewards = table.rewards[table.is_scored]
    metrics = {
        f"{reward_prefix}/mean": float(rewards.mean()),
        f"{reward_prefix}/std": float(rewards.std()),
        f"{reward_prefix}/min": float(rewards.min()),
        f"{reward_prefix}/max": float(rewards.max()),
    }
    if table.has_accuracy:
        metrics[f"{accuracy_prefix}/accuracy"] = float(table.accuracies[table.is_scored].mean())
    scored = [sample for sample, is_scored in zip(table.trajectories, table.is_scored, strict=True) if is_scored]
    turn_rewards = [sum(turn.reward for turn in sample.turns) for sample in scored]
    if any(turn_rewards):
        metrics[f"{accuracy_prefix}/turns"] = float(np.mean(turn_rewards))
    scores = [sample.score for sample in scored]
    for component in sorted(set().union(*(score.components for score in scores))):
        values = [score.component(component) for score in scores]
        metrics[f"{accuracy_prefix}/component/{component}"] = float(np.nanmean(values))
    return metrics


def _compute_metrics_by_source(generated: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Compute mean reward, accuracy and length per data_source; empty if all prompts have the same data_source."""
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for group in generated:
        by_source[group.prompt.data_source] += group.trajectories
    metrics: dict[str, float] = {}
    if len(by_source) < 2:
        return metrics
    for source, trajectories in sorted(by_source.items()):
        table = _TrajectoryTable.from_trajectories(trajectories)
        metrics[f"source/{source}/length"] = float(table.lengths.mean())
        if table.is_scored.any():
            metrics[f"source/{source}/reward"] = float(table.rewards[table.is_scored].mean())
            if table.has_accuracy:
                metrics[f"source/{source}/accuracy"] = float(table.accuracies[table.is_scored].mean())
    return metrics


def find_failure_reason(groups: Iterable[TrajectoryGroup]) -> str:
    """Return the reason of the first failed trajectory; empty if none failed."""
    members = (trajectory for group in groups for trajectory in group.trajectories)
    return next((sample.score.reason for sample in members if sample.score.outcome.failed), "")


def compute_speed_metrics(
    trained_tokens: int, update_seconds: float, iteration_seconds: float, num_gpus: int
) -> dict[str, float]:
    """Compute trained tokens per update second and, if num_gpus > 0, trained tokens per iteration second and GPU."""
    metrics = {}
    if update_seconds:
        metrics["perf/train_tokens_per_second"] = trained_tokens / update_seconds
    if num_gpus and iteration_seconds:
        metrics["perf/throughput"] = trained_tokens / iteration_seconds / num_gpus
    return metrics
