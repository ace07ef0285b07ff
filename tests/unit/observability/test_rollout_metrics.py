"""Metrics of an iteration, calculated by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alphaapollo.config.schema import Actor
from alphaapollo.observability.rollout_metrics import compute_rollout_metrics, compute_speed_metrics
from alphaapollo.trainer.step.credit import compute_advantage_metrics
from alphaapollo.trainer.step.learn import compute_batch_metrics
from alphaapollo.types import EpisodeEnd, JudgeUsage, Outcome, Prompt, Score, Trajectory, TrajectoryGroup
from tests.unit.trainer.samples import build, credit_of, group, played, trajectory


def measured(*groups: TrajectoryGroup, kept: int | None = None) -> dict[str, float]:
    return compute_rollout_metrics(groups, groups[:kept], rounds=1, generation_seconds=2.0)


def select(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(prefix)}


def test_lengths_and_their_quantiles() -> None:
    """Samples of 1 .. 11 tokens, of which the first three are right."""
    samples = [trajectory(i, float(i < 3), i + 1) for i in range(11)]
    samples[10].end = EpisodeEnd.TOKEN_LIMIT
    metrics = measured(group(*samples))
    expected = {
        "response_length/mean": 6.0,
        "response_length/max": 11.0,
        "response_length/p10": 2.0,
        "response_length/p50": 6.0,
        "response_length/p90": 10.0,
        "response_length/p99": 10.9,
        "response_length/right": 2.0,
        "response_length/wrong": (4 + 11) / 2,
        "response_length/clip_ratio": 1 / 11,
        "prompt_length/mean": 2.0,
        "prompt_length/max": 2.0,
        "rollout/tokens": 66.0,
        "rollout/tokens_per_second": 33.0,
        "reward/accuracy": 3 / 11,
        "end/token_limit": 1 / 11,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_rewards_of_turns() -> None:
    """Failed trajectories are ignored. Without rewards of turns, there is no such metric."""
    samples = [trajectory(0, 1.0, 1), trajectory(1, 0.0, 1), trajectory(2, math.nan, 1, Outcome.GRADER_FAILED)]
    assert "reward/turns" not in measured(group(*samples))
    samples[0].turns[0].reward, samples[2].turns[0].reward = 0.5, 8.0
    metrics = measured(group(*samples))
    assert (metrics["reward/turns"], metrics["critic/score/mean"]) == (0.25, 0.75)


def test_the_prompt_length_of_agents_is_that_of_the_first_answer() -> None:
    one = trajectory(0, 1.0, 1)
    one.turns[0].answer_number = 1  # of a branch, whose row ends before the others
    one.turns.append(replace(one.turns[0], context_ids=[7] * 5, answer_number=0))
    assert measured(group(one))["prompt_length/mean"] == 5.0


def test_group_shares() -> None:
    lost = trajectory(1, math.nan, 9, Outcome.GRADER_FAILED)
    groups = [
        group(trajectory(0, 1.0, 1), trajectory(1, 1.0, 1)),
        group(trajectory(0, 0.0, 1), trajectory(1, 0.5, 1)),  # none right, but not equal
        group(trajectory(0, 0.0, 1), trajectory(1, 1.0, 1)),
        group(trajectory(0, 0.0, 1), lost),
        group(lost, lost),
    ]
    metrics = measured(*groups, kept=4)
    assert select(metrics, "groups/") == {
        "groups/all_right": 1 / 5,
        "groups/all_wrong": 2 / 5,
        "groups/mixed": 1 / 5,
        "groups/zero_variance": 2 / 5,
        "groups/partial": 1 / 5,
        "groups/dropped": 1 / 5,
    }
    assert metrics["outcome/failed"] == metrics["outcome/grader_failed"] == 3 / 10
    assert metrics["response_length/wrong"] == 1.0, "failed trajectories are not wrong"
    assert metrics["critic/score/mean"] == 3.5 / 7 and metrics["rollout/groups_kept"] == 4


def test_without_accuracies_no_sample_is_right_or_wrong() -> None:
    sums = [played([0.0], Score(total, {"correct": 1.0, "short": total - 1})) for total in (1.0, 1.5)]
    metrics = measured(group(*sums), group(trajectory(0, 0.0, 1), trajectory(1, 1.0, 1)))
    assert [*select(metrics, "groups/")] == ["groups/zero_variance", "groups/partial", "groups/dropped"]
    assert not {"reward/accuracy", "response_length/right", "response_length/wrong"} & metrics.keys()
    assert metrics["reward/component/short"] == 0.25


def test_a_group_of_one_has_no_variance_to_compare() -> None:
    metrics = measured(group(trajectory(0, 0.0, 1)), group(trajectory(0, 1.0, 1)))
    assert metrics["groups/zero_variance"] == 0.0 and metrics["groups/all_right"] == metrics["groups/all_wrong"] == 0.5


def test_judgements_of_all_trajectories() -> None:
    samples = [trajectory(number, 1.0, 1) for number in range(3)]
    for sample, usage in zip(samples, [JudgeUsage(2, 1, 0.5), JudgeUsage(2, 0, 1.5), JudgeUsage()], strict=True):
        sample.score = replace(sample.score, judge_usage=usage)
    expected = {"judge/judgements": 4, "judge/cache_hit_rate": 0.25, "judge/seconds": 0.5}
    assert select(measured(group(*samples)), "judge/") == expected
    assert not select(measured(group(samples[2])), "judge/")


def test_several_data_sources_have_metrics_of_their_own() -> None:
    def of(source: str, *trajectories: Trajectory) -> TrajectoryGroup:
        return TrajectoryGroup(Prompt(0, source, "text"), list(trajectories))

    failed = trajectory(1, math.nan, 6, Outcome.GRADER_FAILED)
    both = measured(of("a/b", trajectory(0, 1.0, 2), failed), of("c", trajectory(0, 0.0, 4)))
    expected = {"a/b": (1.0, 1.0, 4.0), "c": (0.0, 0.0, 4.0)}
    names = ("reward", "accuracy", "length")
    own = {source: tuple(both[f"source/{source}/{name}"] for name in names) for source in expected}
    assert own == expected and len(select(both, "source/")) == 6
    assert not select(measured(of("c", trajectory(0, 0.0, 4))), "source/")


def test_cached_tokens_are_a_share_of_prompt_tokens() -> None:
    """Two turns, each of 2 tokens and an action of 1: prompts of 2 and 5 tokens, of which 0 and 3 were cached."""
    episode = played([0.0, 0.0], score=trajectory(0, 1.0, 1).score)
    assert episode.prompt_lengths == [2, 5]
    last = episode.turns[1]
    episode.turns[1] = replace(last, completion=replace(last.completion, num_cached_tokens=3))
    assert measured(group(episode))["rollout/prompt_tokens_cached"] == 3 / 7


def test_tool_calls() -> None:
    without = trajectory(0, 1.0, 1)
    assert measured(group(without))["tool/calls_per_turn"] == 0.0
    with_calls = trajectory(1, 1.0, 1)
    with_calls.turns[0].info = {"tool_calls": [{"status": "ok", "seconds": 1.0}, {"status": "error", "seconds": 3.0}]}
    metrics = measured(group(without, with_calls))
    assert (metrics["tool/calls_per_turn"], metrics["tool/seconds"], metrics["tool/ok"]) == (1.0, 2.0, 0.5)


def credit(samples: list[Trajectory], actor: Actor | None = None, **algorithm: Any) -> dict[str, float]:
    batch = build([group(*samples)], actor, **algorithm)
    return credit_of(batch, "dr_grpo", actor=actor, **algorithm).metrics


def test_advantages_over_action_tokens() -> None:
    """Rewards 1 and 0 without division: advantages .5 on one token, -.5 on three."""
    metrics = credit([trajectory(0, 1.0, 1), trajectory(1, 0.0, 3)])
    assert metrics == {
        "critic/rewards/mean": 0.5,
        "critic/advantages/mean": -0.25,
        "critic/advantages/std": pytest.approx(math.sqrt(0.25 - 0.0625)),
        "critic/advantages/min": -0.5,
        "critic/advantages/max": 0.5,
        "critic/advantages/abs_mean": 0.5,
        "critic/advantages/share_zero": 0.0,
    }


def test_the_standard_deviation_of_many_advantages_is_that_of_numpy() -> None:
    advantages = np.random.default_rng(0).normal(size=300_001).astype(np.float32)
    metrics = compute_advantage_metrics(advantages, np.ones(1, dtype=bool))
    assert metrics["critic/advantages/std"] == float(advantages.std(dtype=np.float64))


def test_the_length_penalty_excludes_invalid_actions() -> None:
    """max_length 100, cache 20: 90 tokens cost .5, 80 nothing."""
    actor = Actor(use_invalid_action_penalty=True, invalid_action_penalty_coef=0.25)
    samples = [trajectory(0, 1.0, 90, valid=False), trajectory(1, 0.0, 80)]
    metrics = credit(samples, actor=actor, overlong_penalty={"enable": True})
    assert metrics["reward/length_penalty"] == pytest.approx(0.25)
    assert "reward/length_penalty" not in credit(samples)


def test_layout_metrics() -> None:
    """Rows of 3, 4, 5 and 6 tokens (a prompt of 2): padded to their longest in micro-batches of 12 cells at most."""
    groups = [group(*(trajectory(i, float(i), 1 + i) for i in range(4)))]
    actor = Actor(shuffle=False, ppo_max_token_len_per_gpu=12)
    layout = build(groups, actor).layout
    packed = compute_batch_metrics(layout, padded=False, num_failed=2, num_trained=4)
    assert packed == {
        "batch/trajectories": 4.0,
        "batch/lost": 2.0,
        "batch/rows": 4.0,
        "batch/tokens": 18.0,
        "batch/sharing": 1.0,
        "batch/micro_batches": 2.0,
        "batch/padding": 0.0,
        "batch/rank_imbalance": 0.0,
    }
    cells = 2 * 6 + 2 * 4  # for 18 tokens
    assert compute_batch_metrics(layout, True, 0, 4)["batch/padding"] == pytest.approx(1 - 18 / cells)
    two = build(groups, actor, num_ranks=2).layout
    loads = sorted(int(np.sum(rank.rows.lengths)) for rank in two.rank_batches)
    assert compute_batch_metrics(two, False, 0, 4)["batch/rank_imbalance"] == pytest.approx(loads[-1] / 9 - 1)


def test_speed_per_gpu_only_on_gpus() -> None:
    assert compute_speed_metrics(600, update_seconds=2.0, iteration_seconds=6.0, num_gpus=0) == {
        "perf/train_tokens_per_second": 300.0
    }
    assert compute_speed_metrics(600, 2.0, 6.0, 4)["perf/throughput"] == 25.0
    assert compute_speed_metrics(0, 0.0, 6.0, 0) == {}
