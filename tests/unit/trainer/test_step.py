from __future__ import annotations

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.trainer.step import WorkerColumns, assign_credit, build_batch
from alphaapollo.types import (
    Completion,
    EpisodeEnd,
    Outcome,
    Prompt,
    Row,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def trajectory(
    sample: int, reward: float, length: int, outcome: Outcome = Outcome.SCORED, valid: bool = True
) -> Trajectory:
    """A prompt of two tokens and one turn of `length` tokens."""
    actions = list(range(length))
    completion = Completion(actions, [-0.5] * length, StopReason.STOP, weight_version=0)
    row = Row([7, 8, *actions], [0, 0] + [1] * length, [0.0, 0.0] + [-0.5] * length, turn_ends=[1 + length])
    return Trajectory(
        prompt_id=0,
        sample=sample,
        turns=[Turn([7, 8], completion, "text", valid=valid)],
        rows=[row] if length else [],
        score=Score(reward, {"accuracy": reward}, outcome),
        end=EpisodeEnd.DONE,
    )


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(Prompt(0, "test", "text"), list(trajectories))


def build(groups: list[TrajectoryGroup], actor: Actor | None = None, num_ranks: int = 1):  # type: ignore[no-untyped-def]
    return build_batch(groups, actor or Actor(shuffle=False), 100.0, num_ranks, padded=False, run_seed=0, step=1)


def test_outcome_stands_on_the_last_action_token() -> None:
    batch = build([group(trajectory(0, 1.0, 2), trajectory(1, 0.5, 3))])
    assert batch.token_rewards.tolist() == [[0, 1, 0], [0, 0, 0.5]]
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_invalid_turn_costs_the_penalty_on_its_last_token() -> None:
    actor = Actor(use_invalid_action_penalty=True, invalid_action_penalty_coef=0.25)
    batch = build([group(trajectory(0, 1.0, 2, valid=False), trajectory(1, 1.0, 2))], actor)
    assert batch.token_rewards.tolist() == [[0, 0.75], [0, 1]]


def test_step_rewards_and_outcome_of_two_turns_in_one_row() -> None:
    first, second = (Completion([1], [-0.1], StopReason.STOP, 0) for _ in range(2))
    turns = [Turn([7], first, "a", reward=0.5), Turn([9, 9], second, "b")]
    row = Row([7, 1, 9, 9, 1], [0, 1, 0, 0, 1], [0, -0.1, 0, 0, -0.1], turn_ends=[1, 4])
    both = Trajectory(0, 0, turns, [row], Score(2.0), EpisodeEnd.DONE)
    assert build([group(both)]).token_rewards.tolist() == [[0.5, 0, 0, 2.0]]


def test_rows_of_memory_context_carry_the_outcome_once() -> None:
    completion = Completion([1], [-0.1], StopReason.STOP, 0)
    turns = [Turn([7], completion, "a", reward=0.5), Turn([8], completion, "b", reward=0.25)]
    rows = [Row([7, 1], [0, 1], [0, -0.1], [1], 0), Row([8, 1], [0, 1], [0, -0.1], [1], 1)]
    batch = build([group(Trajectory(0, 0, turns, rows, Score(1.0), EpisodeEnd.DONE))])
    assert batch.token_rewards.tolist() == [[0.5], [1.25]]
    assert batch.trajectory_ids.tolist() == [0, 0]


def test_failed_and_empty_trajectories_leave_every_statistic() -> None:
    failed = trajectory(1, float("nan"), 2, Outcome.GRADER_FAILED)
    batch = build([group(trajectory(0, 1.0, 2), failed, trajectory(2, 0.0, 2), trajectory(3, 1.0, 0))])
    assert len(batch.rows) == 2
    columns, _ = assign_credit(batch, WorkerColumns(), get_estimator("grpo"), Algorithm(), kl_coef=0.0)
    deviation = 0.5 / np.sqrt(0.5)  # of rewards 1 and 0, ddof 1
    assert columns[0].advantages == pytest.approx([deviation, deviation, -deviation, -deviation], rel=1e-5)


def test_loss_weights_are_the_same_for_any_number_of_ranks() -> None:
    groups = [group(*(trajectory(i, float(i), 1 + i) for i in range(4))) for _ in range(2)]
    actor = Actor(ppo_mini_batch_size=4, shuffle=False, loss_agg_mode="seq-mean-token-mean")
    one, two = build(groups, actor, 1), build(groups, actor, 2)
    assert one.loss_weights.tolist() == two.loss_weights.tolist()
    assert one.loss_weights[:4].tolist() == pytest.approx([1 / 4, 1 / 8, 1 / 12, 1 / 16])
    assert len(two.layout.rank_batches) == 2


def test_kl_in_the_reward_is_per_token_k1() -> None:
    batch = build([group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 2))])
    computed = WorkerColumns(
        old_logprobs=np.array([[-1.0, -2.0], [-1.0, -1.0]], dtype=np.float32),
        ref_logprobs=np.array([[-1.5, -2.0], [-1.0, -3.0]], dtype=np.float32),
        values=np.zeros((2, 2), dtype=np.float32),
    )
    algorithm = Algorithm(use_kl_in_reward=True, whiten_advantages=False)
    columns, metrics = assign_credit(batch, computed, get_estimator("gae"), algorithm, kl_coef=0.1)
    # rewards: [-0.05, 1.0] and [0, -0.2]; gamma = lambda = 1, values 0: reward to go, rows longest first and stable
    assert batch.layout.to_matrix([column.advantages for column in columns]) == pytest.approx(
        np.array([[0.95, 1.0], [-0.2, -0.2]]), rel=1e-5
    )
    assert metrics["kl/per_sequence"] == pytest.approx((0.5 + 2.0) / 2)
    assert metrics["kl/per_token"] == pytest.approx(2.5 / 4)


def test_columns_come_back_to_their_rows_over_two_ranks() -> None:
    groups = [group(*(trajectory(i, float(i), 1 + i) for i in range(4)))]
    batch = build(groups, num_ranks=2)
    matrix = torch.arange(16, dtype=torch.float32).reshape(4, 4).numpy() * batch.mask.numpy().astype(np.float32)
    assert (batch.layout.to_matrix(batch.layout.split_columns(matrix)) == matrix).all()
