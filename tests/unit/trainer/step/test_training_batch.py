from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alphaapollo.batching.batch import Columns
from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Actor, SelfTeacher, Teacher
from alphaapollo.trainer.step.build_batch import build_batch
from alphaapollo.trainer.step.credit import assign_credit
from alphaapollo.trainer.step.selection import is_usable_for_training
from alphaapollo.trainer.step.shaped_rewards import check_prompts_have_length_budgets
from alphaapollo.types import LONGER_PROMPT, EpisodeEnd, Outcome, Prompt, Trajectory
from tests.builders import make_trajectory, make_turn
from tests.matrices import pad
from tests.unit.trainer.samples import build, credit_of, group, make_config, matrix_of, trajectory

PENALTY = {"use_invalid_action_penalty": True, "invalid_action_penalty_coef": 0.25}
STEPS = make_trajectory(make_turn(1, [7], reward=0.5), make_turn(1, [9, 9]), score=2.0)
MEMORY_STEPS = make_trajectory(make_turn(1, reward=0.5), make_turn(1, reward=0.25), memory=True)


@pytest.mark.parametrize(
    ("actor", "trajectories", "rewards"),
    [
        ({}, [trajectory(0, 1.0, 2), trajectory(1, 0.5, 3)], [0, 1, 0, 0, 0.5]),  # on the last action token
        # an invalid turn costs the penalty on its last token
        (PENALTY, [trajectory(0, 1.0, 2, valid=False), trajectory(1, 1.0, 2)], [0, 0.75, 0, 1]),
        ({}, [STEPS], [0.5, 0, 0, 2.0]),  # step rewards and outcome of two turns in one row
        ({}, [MEMORY_STEPS], [0.5, 1.25]),  # rows of memory context carry the outcome once
    ],
)
def test_rewards_of_turns_and_outcomes(actor: dict[str, Any], trajectories: list[Trajectory], rewards: list[float]):
    assert build([group(*trajectories)], Actor(shuffle=False, **actor)).token_rewards.tolist() == rewards


MEMORY = [group(make_trajectory(2, 2, memory=True), make_trajectory(2, score=0.0, sample=1, memory=True))]


def test_a_sequence_of_the_loss_is_a_trajectory_not_a_row() -> None:
    batch = build(MEMORY, Actor(shuffle=False, loss_agg_mode="seq-mean-token-mean"))
    assert batch.loss_weights.tolist() == [1 / 8, 1 / 8, 1 / 4]  # 4 and 2 tokens, two sequences
    assert batch.sequence_weights.tolist() == [0.5, 0.5, 0.5]


def test_rows_of_a_trajectory_share_a_micro_batch_only_for_sequence_ratios() -> None:
    def micro_batches(loss: str, **correction: Any) -> int:
        actor = Actor(shuffle=False, ppo_max_token_len_per_gpu=4, policy_loss={"loss_mode": loss})
        (step,) = build(MEMORY, actor, rollout_correction=correction).layout.rank_batches[0].mini_batches
        return len(step.micro_batches)

    assert [micro_batches(loss) for loss in ("ppo", "gspo", "gspo_token", "gmpo")] == [3, 2, 2, 2]
    assert micro_batches("ppo", method="mask", level="sequence") == 2
    assert micro_batches("ppo", method="tis", level="token") == 3


@pytest.mark.parametrize(
    ("estimator", "mode", "whole"),
    [
        ("grpo", "token-mean", False),
        ("grpo", "group-mean-token-mean", True),
        ("magistral", "token-mean", True),
    ],
)
def test_groups_share_a_mini_batch_that_is_normalized(estimator: str, mode: str, whole: bool) -> None:
    groups = [group(*(trajectory(i, float(i), 2) for i in range(4))) for _ in range(8)]
    batch = build(groups, Actor(ppo_mini_batch_size=8, loss_agg_mode=mode), adv_estimator=estimator)
    of_mini_batches = [set(batch.group_ids[rows].tolist()) for rows in batch.layout.mini_batch_rows]
    assert [len(rows) for rows in batch.layout.mini_batch_rows] == [8] * 4
    assert all(len(groups) == 2 for groups in of_mini_batches) == whole
    if estimator == "magistral":
        advantages = matrix_of(batch, credit_of(batch, estimator))
        for rows in batch.layout.mini_batch_rows:
            assert advantages[rows, 0].std(ddof=1) == pytest.approx(1.0)


KL_COV = {"loss_mode": "kl_cov", "kl_cov_ratio": 0.05}
CLIP_COV = {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}


@pytest.mark.parametrize("loss", [KL_COV, CLIP_COV])
def test_tokens_are_chosen_over_the_mini_batch_by_the_old_log_probs(loss: dict[str, Any]) -> None:
    """Neither the order of samples nor the cut into micro-batches matters."""
    samples = [trajectory(i, float(i), 10) for i in range(4)]
    old = np.full((4, 10), -1.0, dtype=np.float32)
    old[3, 6], old[0, 2] = -0.1, -3.0  # likely beside the best, unlikely beside the worst
    actor = {"policy_loss": loss}

    def chosen(order: list[int], **more: Any) -> np.ndarray:
        batch = build([group(*(samples[i] for i in order))], Actor(**actor, **more))
        credit = credit_of(batch, "dr_grpo", Columns(old_logprobs=old[order].flatten()), Actor(**actor))
        return matrix_of(batch, credit, "selected_tokens")[np.argsort(order)]

    expected = chosen([0, 1, 2, 3])
    if loss is KL_COV:
        assert np.argwhere(expected).tolist() == [[0, 2], [3, 6]]
    else:
        assert expected.sum() == 8  # drawn
    for cut in ({"ppo_max_token_len_per_gpu": 1}, {"shuffle": False}, {}):
        assert (chosen([2, 0, 3, 1], **cut) == expected).all()


def test_rewards_in_another_order_have_exactly_the_same_sum() -> None:
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 where each sum is rounded."""
    samples = [
        make_trajectory(*(make_turn(1, reward=reward) for reward in rewards), score=0.0, sample=sample, memory=True)
        for sample, rewards in enumerate(([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]))
    ]
    batch = build([group(*samples)])
    credit = credit_of(batch, "gpg", norm_adv_by_std_in_grpo=True)  # no epsilon: a leak would be an advantage of 0.7
    assert not matrix_of(batch, credit).any()


def test_failed_and_empty_trajectories_are_excluded() -> None:
    failed = trajectory(1, float("nan"), 2, Outcome.GRADER_FAILED)
    batch = build([group(trajectory(0, 1.0, 2), failed, trajectory(2, 0.0, 2), make_trajectory(sample=3))])
    assert len(batch.rows) == 2
    columns = credit_of(batch, "grpo").columns
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
    computed = Columns(
        old_logprobs=np.array([-1.0, -2.0, -1.0, -1.0], dtype=np.float32),
        ref_logprobs=np.array([-1.5, -2.0, -1.0, -3.0], dtype=np.float32),
        values=np.zeros(4, dtype=np.float32),
    )
    credit = credit_of(batch, "gae", computed, kl_coef=0.1, use_kl_in_reward=True, whiten_advantages=False)
    metrics = credit.metrics
    # rewards: [-0.05, 1.0] and [0, -0.2]; gamma = lambda = 1, values 0: reward to go, rows longest first and stable
    assert matrix_of(batch, credit) == pytest.approx(np.array([[0.95, 1.0], [-0.2, -0.2]]), rel=1e-5)
    assert metrics["actor/reward_kl_penalty_per_sequence"] == pytest.approx((0.5 + 2.0) / 2)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.5 / 2 + 2.0 / 2) / 2)


@pytest.mark.parametrize(
    ("algorithm", "trajectories", "expected"),
    [
        # max_length 100: a fifth is 20
        ({"overlong_penalty": {"enable": True, "factor": 0.5}}, [(1.0, 80), (1.0, 90), (1.0, 100)], [1.0, 0.75, 0.5]),
        ({"overlong_penalty": {"enable": True, "cache": 40}}, [(1.0, 80), (1.0, 90), (1.0, 100)], [0.5, 0.25, 0.0]),
        # 2, 0 and 3 tokens away from the prompt's 4
        ({"length_budget": {"mode": "exact", "coef": 0.1}}, [(1.0, 2), (1.0, 4), (0.0, 7)], [0.8, 1.0, -0.3]),
        ({"length_budget": {"mode": "max", "coef": 0.1}}, [(1.0, 2), (1.0, 4), (0.0, 7)], [0.7, 0.5, 0.0]),
    ],
)
def test_rewards_are_shaped_by_length(
    algorithm: dict[str, Any], trajectories: list[tuple[float, int]], expected: list[float]
) -> None:
    samples = [trajectory(i, reward, length) for i, (reward, length) in enumerate(trajectories)]
    batch = build([group(*samples, length_budget=4)], **algorithm)
    assert pad(batch.layout, batch.token_rewards).sum(-1).tolist() == pytest.approx(expected)


def test_overlong_filter_removes_the_loss_only() -> None:
    cut = trajectory(1, 0.0, 4)
    cut.end = EpisodeEnd.TOKEN_LIMIT
    batch = build([group(trajectory(0, 1.0, 2), cut)], overlong_filter=True)
    assert batch.loss_weights.tolist() == [0.5, 0.0]  # token-mean over the two tokens that are left
    assert batch.sequence_weights.tolist() == [0.5, 0.0]  # a mean over both, of which one has no loss
    assert batch.value_weights.tolist() == pytest.approx([1 / 6, 1 / 6])  # the critic learns from all
    constant = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 10}
    pair = [group(trajectory(0, 1.0, 2), cut)]
    weights = build(pair, Actor(shuffle=False, **constant), overlong_filter=True).loss_weights
    assert weights.tolist() == pytest.approx([1 / 20, 0.0])  # the trajectory that is left out still counts
    advantages = matrix_of(batch, credit_of(batch, "dr_grpo"))
    assert advantages.tolist() == [[0.5, 0.5, 0, 0], [-0.5] * 4]


def test_a_missing_length_budget_is_named() -> None:
    good, bad = Prompt(3, "test", "a", extra_info={"length_budget": 8}), Prompt(4, "test", "b")
    check_prompts_have_length_budgets([good])
    with pytest.raises(ValueError, match="row 4 has None"):
        check_prompts_have_length_budgets([good, bad])


def test_remax_baseline_is_shaped_like_the_samples() -> None:
    greedy = trajectory(2, 0.5, 90)
    penalty = {"enable": True, "cache": 20}
    batch = build([group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 3), baseline=greedy)], overlong_penalty=penalty)
    assert len(batch.rows) == 2  # the baseline is not trained on
    advantages = matrix_of(batch, credit_of(batch, "remax"))
    assert advantages.tolist() == [[1.0, 1.0, 0], [0.0, 0.0, 0.0]]  # 0.5 - 0.5 = 0 is what greedy was expected


def test_a_group_without_baseline_or_samples_is_not_usable() -> None:
    failed = trajectory(1, float("nan"), 2, Outcome.GRADER_FAILED)
    assert not is_usable_for_training(group(failed, failed))
    assert not is_usable_for_training(group(trajectory(0, 1.0, 2), baseline=failed))
    assert is_usable_for_training(group(trajectory(0, 1.0, 2)))


def test_filtration_weights_within_each_group() -> None:
    groups = [group(*(trajectory(i, reward, 1) for i, reward in enumerate([0.0, 1.0, 2.0, 3.0])))]
    batch = build(groups, filtration={"method": "best_worst"})
    assert batch.loss_weights.tolist() == batch.value_weights.tolist() == [0.5, 0.0, 0.0, 0.5]
    assert build(groups, filtration={"method": "best"}).sequence_weights.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_only_the_selected_samples_are_in_the_batch() -> None:
    """The baseline is the mean of the selected samples, or of all."""
    groups = [group(*(trajectory(i, reward, 1 + i) for i, reward in enumerate([0.0, 0.5, 1.0, 0.0])))]
    selected = build(groups, filtration={"method": "max_variance", "size": 2})
    of_all = build(groups, filtration={"method": "extremes", "size": 2, "baseline": "all"})
    assert not selected.others.trajectories
    assert of_all.others.num_actions.tolist() == [2.0, 4.0]
    for batch, estimator, expected in (
        (selected, "dr_grpo", [-0.5, 0.5]),
        (of_all, "dr_grpo", [-0.375, 0.625]),  # the mean of all is 3/8
        (of_all, "opo", [-0.4, 0.6]),  # weighted by length: (0.5 * 2 + 1 * 3) / 10
    ):
        assert [one.sample for one in batch.trajectories] == [0, 2]
        assert batch.loss_weights.tolist() == [0.25, 0.25]  # over four tokens
        assert matrix_of(batch, credit_of(batch, estimator))[:, 0].tolist() == pytest.approx(expected)


def test_random_selections_change_with_the_iteration_only() -> None:
    groups = [group(*(trajectory(i, 1.0, 1) for i in range(8)))]
    config = make_config(Actor(), filtration={"method": "random", "size": 2})
    chosen = [
        [one.sample for one in build_batch(groups, config, step, 1, 100, False, False).trajectories]
        for step in (1, 1, 2, 3, 4)
    ]
    assert chosen[0] == chosen[1] and len({tuple(one) for one in chosen}) > 1
    assert all(len(one) == 2 for one in chosen)


@pytest.mark.parametrize(("mode", "expected"), [("token-sum", 2.0), ("seq-mean-token-sum", 0.5)])
def test_the_loss_of_remaining_groups_is_that_of_a_full_batch(mode: str, expected: float) -> None:
    """Two of the four planned groups of two samples, in two mini-batches: each step has two instead of four samples."""
    groups = [group(*(trajectory(i, float(i), 1) for i in range(2))) for _ in range(2)]
    config = make_config(
        Actor(loss_agg_mode=mode, ppo_mini_batch_size=4), filter_groups={"enable": True, "mode": "reweight"}
    )
    config = replace_value(replace_value(config, "data.train_batch_size", 4), "env.rollout.n", 2)
    batch = build_batch(groups, config, 1, 1, 100, padded=False, uses_shared_prompts=False)
    assert [len(rows) for rows in batch.layout.mini_batch_rows] == [2, 2]
    assert batch.loss_weights.tolist() == [expected] * 4


def test_rows_without_a_teacher_context_are_in_no_denominator() -> None:
    """Lengths 2, 3, 4, of which the second has no context: token-mean weights 1/6, 0, 1/6 instead of 1/9; mean over
    sequences of 1 / (2 x 2), 0, 1 / (2 x 4)."""
    samples = [trajectory(0, 1.0, 2), trajectory(1, 0.0, 3), trajectory(2, 0.0, 4)]
    for one in (samples[0], samples[2]):
        one.rows[0].columns[LONGER_PROMPT] = [1, 2, 3]
    teacher = Teacher(divergence="jsd", self_teacher=SelfTeacher(context="feedback"))
    for mode, expected in (("token-mean", [1 / 6, 0, 1 / 6]), ("seq-mean-token-mean", [1 / 4, 0, 1 / 8])):
        actor = Actor(shuffle=False, loss_agg_mode=mode)
        config = replace_value(make_config(actor, adv_estimator="none"), "teacher", teacher)
        batch = build_batch([group(*samples)], config, 1, 1, 100, padded=False, uses_shared_prompts=False)
        assert batch.divergence_weights.tolist() == pytest.approx(expected)
        credit = assign_credit(batch, Columns(), config)
        assert credit.has_gradient.tolist() == [True, False, True]
        assert credit.metrics["distill/rows_with_context"] == pytest.approx(2 / 3)
    plain = replace_value(config, "teacher", Teacher())
    batch = build_batch([group(*samples)], plain, 1, 1, 100, padded=False, uses_shared_prompts=False)
    assert batch.divergence_weights.tolist() == batch.loss_weights.tolist()
