"""Groups to numbers: what one iteration's metrics say about its rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from alphaapollo.types import EpisodeEnd, Outcome, Trajectory, TrajectoryGroup, Turn


def summarize_rollouts(generated: Sequence[TrajectoryGroup], seconds: float) -> dict[str, float]:
    """Rewards, lengths, ends and failures of all generated trajectories; a failed one has no reward."""
    trajectories = [trajectory for group in generated for trajectory in group.trajectories]
    scored = [trajectory for trajectory in trajectories if not trajectory.score.outcome.failed]
    tokens = np.array([trajectory.num_tokens for trajectory in trajectories])
    prompt_tokens = sum(len(t.turns[0].context_ids) for t in trajectories if t.turns)
    cached = sum(turn.completion.num_cached_tokens for t in trajectories for turn in t.turns)
    metrics = {
        "rollout/trajectories": float(len(trajectories)),
        "rollout/tokens": float(tokens.sum()),
        "rollout/tokens_per_second": float(tokens.sum() / seconds) if seconds else 0.0,
        "rollout/turns_mean": float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
        "rollout/prompt_tokens_cached": cached / prompt_tokens if prompt_tokens else 0.0,
        "response/length_mean": float(tokens.mean()),
        "response/length_max": float(tokens.max()),
        "response/truncated": sum(t.truncated for t in trajectories) / len(trajectories),
    }
    outcomes, ends = Counter(t.score.outcome for t in trajectories), Counter(t.end for t in trajectories)
    metrics |= {f"outcome/{outcome}": outcomes[outcome] / len(trajectories) for outcome in Outcome}
    metrics |= {f"end/{end}": ends[end] / len(trajectories) for end in EpisodeEnd}
    metrics |= summarize_tools([turn for trajectory in trajectories for turn in trajectory.turns])
    baselines = [group.baseline for group in generated if group.baseline is not None]
    if baselines:
        metrics["baseline/failed"] = sum(one.score.outcome.failed for one in baselines) / len(baselines)
        metrics |= summarize_scores([one for one in baselines if not one.score.outcome.failed], "baseline")
    return metrics | summarize_scores(scored, "reward")


def summarize_tools(turns: Sequence[Turn]) -> dict[str, float]:
    """Tool calls a turn, and what came of them, as shares of the calls; {} without any. Turns whose action could not be
    read, or whose calls were refused, are turn/invalid."""
    metrics = {"turn/invalid": sum(not turn.valid for turn in turns) / len(turns)} if turns else {}
    calls = [call for turn in turns for call in turn.info.get("tool_calls", ())]
    if not calls:
        return metrics
    metrics["tool/calls_a_turn"] = len(calls) / len(turns)
    metrics["tool/seconds"] = float(np.mean([call["seconds"] for call in calls]))
    for status, count in Counter(call["status"] for call in calls).items():
        metrics[f"tool/{status}"] = count / len(calls)
    return metrics


def summarize_scores(scored: Sequence[Trajectory], name: str) -> dict[str, float]:
    """Mean, spread, accuracy and named components of trajectories that have a score."""
    if not scored:
        return {}
    rewards = np.array([t.score.reward + sum(turn.reward for turn in t.turns) for t in scored])
    metrics = {
        f"{name}/mean": float(rewards.mean()),
        f"{name}/std": float(rewards.std()),
        f"{name}/min": float(rewards.min()),
        f"{name}/max": float(rewards.max()),
        f"{name}/accuracy": float(np.mean([t.score.accuracy for t in scored])),
    }
    for component in sorted({component for t in scored for component in t.score.components}):
        values = [t.score.components[component] for t in scored if component in t.score.components]
        metrics[f"{name}/component/{component}"] = float(np.mean(values))
    return metrics
