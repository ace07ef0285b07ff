"""Errors of widespread implementations that this project avoids: one test for each finding, with numbers.

D1 .. D24 are the rows of the table "what others do differently" in docs/algorithms/README.md.
"""

import math
from typing import get_args

import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, get_estimator
from alphaapollo.algorithms.advantages.grpo import gpg_alpha, magistral
from alphaapollo.algorithms.aggregation import aggregate_sequence_losses, aggregate_token_losses, row_weights
from alphaapollo.algorithms.kl import REVERSE, kl_penalty, next_kl_coef, subtract_kl, unbiased_kl
from alphaapollo.algorithms.mismatch import rollout_correction_weights
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.algorithms.preference_losses import AnswerBatch, get_preference_loss
from alphaapollo.algorithms.statistics import Groups, center_in_groups, has_variance
from alphaapollo.config.schema import Actor, AggregationMode, Algorithm, KLControl, Preference
from alphaapollo.models.lm_head import DivergenceTarget, LmHead, LmHeadInput, compute_token_stats
from tests.unit.algorithms.batches import make_advantage_inputs


def advantages(name: str, inputs: AdvantageInputs, **options: object) -> torch.Tensor:
    return get_estimator(name)(inputs, Algorithm(**options)).advantages


def token_inputs(log_ratios: list[list[float]], adv: list[list[float]], mask: list[list[int]]) -> PolicyLossInputs:
    logp = torch.tensor(log_ratios, requires_grad=True)
    return PolicyLossInputs(logp, torch.zeros_like(logp), torch.tensor(adv), torch.tensor(mask, dtype=torch.float32))


@pytest.mark.parametrize("reward", [0.7, 0.1, 0.3])
def test_d1_equal_rewards_in_float32_have_zero_advantage(reward: float):
    batch = make_advantage_inputs([reward] * 8, [0] * 8, torch.ones(8, 1))
    for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "magistral", "reinforce_plus_plus_baseline", "grpo_passk"):
        assert not advantages(name, batch).any()
    assert not has_variance([reward] * 3)


def test_d2_reward_on_a_masked_token_is_kept():
    mask = torch.tensor([[1.0, 1.0, 0.0]])  # the last attended token is a tool's answer
    rewards = torch.tensor([[0.0, 0.0, 1.0]])  # an environment that put it there all the same
    others = {"values": torch.zeros(1, 3), "greedy_rewards": torch.zeros(1)}
    inputs = make_advantage_inputs([1.0], [0], mask, token_rewards=rewards, **others)
    for name in ("gae", "reinforce_plus_plus", "remax"):
        assert get_estimator(name)(inputs, Algorithm()).returns.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize(("second", "alpha"), [([1.0, 0, 0, 0], 1.0), ([1.0, 1, 1, 1], 2.0)])
def test_d3_gpg_counts_groups_without_variance(second: list[float], alpha: float):
    scores = torch.tensor([1.0, 0, 0, 0, *second])
    assert gpg_alpha(scores, Groups.from_ids(torch.arange(8) // 4)) == alpha


def test_d4_gmpo_over_micro_batches_is_a_mean_over_sequences():
    batch = token_inputs([[0.1, 0.2], [0.3, 0.0], [0.0, 0.0]], [[1.0] * 2] * 3, [[1, 1], [1, 0], [0, 0]])
    weights = torch.tensor([0.5, 0.5, 0.0])
    loss = get_policy_loss("gmpo")(batch, Actor()).loss
    whole = aggregate_sequence_losses(loss, weights)
    parts = sum(aggregate_sequence_losses(loss[rows], weights[rows]) for rows in ([0], [1, 2]))
    assert whole.item() == pytest.approx(-(math.exp(0.15) + math.exp(0.3)) / 2)
    assert parts.item() == pytest.approx(whole.item())


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline", "magistral"])
def test_d5_batch_statistics_are_over_samples_not_tokens(name: str):
    def of(lengths: list[int]) -> torch.Tensor:
        scores = torch.tensor([1.0, 0.0, 0.0, 5.0, 0.0, 0.0])
        mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).float()
        inputs = make_advantage_inputs(scores, torch.arange(6) // 3, mask, components={"accuracy": scores})
        return advantages(name, inputs)[:, 0]

    torch.testing.assert_close(of([1, 2, 3, 4, 5, 6]), of([9, 1, 1, 1, 9, 1]))


def test_d6_cispo_caps_at_1_plus_the_bound_and_has_no_floor():
    batch = token_inputs([[math.log(5.0), math.log(0.01)]], [[1.0, 1.0]], [[1, 1]])
    loss = get_policy_loss("cispo")(batch, Actor(clip_ratio_high=0.28)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), batch.logp)
    assert gradient.tolist() == [pytest.approx([-1.28, -0.01])]


def test_d7_k3_is_not_clamped_at_10():
    for kind, gradient in (("k3", 1 - math.exp(5.9)), ("k3+", -5.9)):
        logp = torch.tensor(-5.9, dtype=torch.float64, requires_grad=True)
        value = kl_penalty(logp, torch.zeros((), dtype=torch.float64), kind)
        value.backward()
        assert value.item() == pytest.approx(math.exp(5.9) - 5.9 - 1)  # 358.1
        assert logp.grad.item() == pytest.approx(gradient)  # -364, -5.9


def test_d8_ratio_clamp_has_no_effect_with_the_dual_clip():
    batch = token_inputs([[24.9]], [[-1.0]], [[1]])
    assert get_policy_loss("ppo")(batch, Actor()).loss.item() == pytest.approx(math.exp(20.0), rel=1e-5)
    dual = get_policy_loss("ppo")(batch, Actor(clip_ratio_c=3.0)).loss
    (gradient,) = torch.autograd.grad(dual.sum(), batch.logp)
    assert (dual.item(), gradient.item()) == (3.0, 0.0)  # as without any guard


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_d9_an_all_masked_batch_has_loss_0_and_no_gradient(mode: AggregationMode):
    loss, mask = torch.full((2, 3), math.nan, requires_grad=True), torch.zeros(2, 3)
    total = aggregate_token_losses(loss, mask, row_weights(mask.sum(1), torch.tensor([0, 1]), mode, 3))
    total.backward()
    assert total == 0.0 and not loss.grad.any()


def test_d10_whitened_gae_is_zero_off_the_mask_and_takes_a_single_token():
    inputs = make_advantage_inputs([1.0], [0], torch.tensor([[1.0, 0.0]]), values=torch.ones(1, 2))
    assert advantages("gae", inputs).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg"])
def test_d11_a_group_of_one_has_no_advantage(name: str):
    assert advantages(name, make_advantage_inputs([1.0, 0.0, 5.0], [0, 0, 1]))[2] == 0.0


def test_d12_bounds_apply_to_the_ratio():
    ratios = torch.tensor([[0.4, 0.6, 2.5, 3.5]])
    zeros, ones = torch.zeros(1, 4), torch.ones(1, 4)
    weights = rollout_correction_weights(ratios.log(), zeros, ones, method="mask", low=0.5, high=3.0)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.6, 2.5, 0.0]]))


def pair_loss(name: str, logp: list[float], lengths: list[float], **keys: float) -> float:
    """Loss of one pair against reference log-probs of 0."""
    good, zeros = torch.tensor([True, False]), torch.zeros(2)
    answers = AnswerBatch(torch.tensor(logp), torch.tensor(lengths), good, zeros)
    return get_preference_loss(name)(answers, Preference(loss=name, **keys)).losses.item()


def test_d13_ipo_uses_sums_and_ipo_mean_uses_means():
    assert pair_loss("ipo", [6.0, 2.0], [3.0, 2.0], beta=0.5) == 9.0  # (4 - 1)^2
    assert pair_loss("ipo_mean", [6.0, 2.0], [3.0, 2.0], beta=0.5) == 0.0  # (2 - 1 - 1)^2


def test_d14_label_smoothing_counts():
    smoothed = pair_loss("sigmoid", [2.0, 0.0], [1.0, 1.0], beta=1.0, label_smoothing=0.1)
    assert smoothed == pytest.approx(pair_loss("sigmoid", [2.0, 0.0], [1.0, 1.0], beta=1.0) + 0.1 * 2.0)


def test_d15_slic_is_not_the_hinge_of_rso():
    """Log-probs -1 and -1.5; for the hinge, log-ratios to a reference of -3 and 0."""
    assert pair_loss("slic", [-1.0, -1.5], [1.0, 1.0], slic_delta=1.0) == 0.5
    assert pair_loss("hinge", [-1.0 - 3.0, -1.5 - 0.0], [1.0, 1.0], beta=1.0) == 3.5


def test_d16_magistral_divides_by_the_spread_of_centred_rewards():
    # two prompts of very different difficulty, the same spread inside: only that spread counts
    scores = torch.tensor([0.0, 2.0, 100.0, 102.0], dtype=torch.float64)
    centered = center_in_groups(scores, Groups.from_ids(torch.tensor([0, 0, 1, 1])))
    got = magistral(centered, torch.zeros(4), ddof=0)
    assert got.tolist() == [-1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("name", ["gmpo", "sequence_ppo", "gspo"])
def test_d17_an_empty_row_adds_nothing(name: str):
    with_empty = token_inputs([[0.1], [0.0]], [[1.0], [9.0]], [[1], [0]])
    alone = token_inputs([[0.1]], [[1.0]], [[1]])

    def loss(batch: PolicyLossInputs) -> float:
        output = get_policy_loss(name)(batch, Actor()).loss
        return aggregate_sequence_losses(output, (batch.mask.sum(1) > 0).double()).item()

    assert loss(with_empty) == loss(alone)


def test_d18_full_kl_is_available():
    hidden = LmHeadInput(torch.eye(2), LmHead(torch.tensor([[1.0, 0.0], [0.0, 2.0]])))
    stats = compute_token_stats(hidden, torch.tensor([0, 1]), 1.0, divergence_target=DivergenceTarget(hidden, REVERSE))
    assert stats.divergence is not None
    assert stats.divergence.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_d19_kl_control_uses_the_kl_per_sequence():
    # 4 tokens of 2 nats: 8 a sequence, above a target of 6, though 2 a token is below
    ones = torch.ones(4)
    shaped = subtract_kl(torch.zeros(4), 2 * ones, torch.zeros(4), ones, torch.tensor([4]), coef=0.1)
    assert shaped.kl_per_sequence == 8.0
    control = KLControl(type="adaptive", target_kl=6.0, horizon=100.0)
    assert next_kl_coef(control, 0.1, shaped.kl_per_sequence.item(), 1) > 0.1


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_d20_a_trajectory_counts_once_however_many_turns_it_has(name: str):
    owners = torch.tensor([0, 0, 0, 1, 2])  # three turns of one trajectory, then two trajectories
    inputs = make_advantage_inputs([1.0, 1.0, 1.0, 0.0, 0.0], [0] * 5, trajectory_ids=owners)
    by_trajectory = advantages(name, make_advantage_inputs([1.0, 0.0, 0.0], [0, 0, 0]))
    torch.testing.assert_close(advantages(name, inputs), by_trajectory[owners])


def test_d20_returns_skip_masked_tokens():
    inputs = make_advantage_inputs([1.0], [0], torch.tensor([[1.0, 0.0, 1.0]]))
    assert get_estimator("reinforce_plus_plus")(inputs, Algorithm()).returns.tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "vespo"])
def test_d21_the_anchor_is_the_engine(name: str):
    assert get_policy_loss(name).anchor == "rollout"  # test_learn.py: then the old log-probs are the engine's


def test_d22_maxrl_of_one_sample_and_of_negative_rewards():
    assert advantages("maxrl", make_advantage_inputs([1.0], [0])).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="at least 0, but got -1"):
        advantages("maxrl", make_advantage_inputs([0.0, -1.0], [0, 0]))


def test_d23_the_unbiased_kl_has_the_ratio_of_the_token_and_no_clamp():
    logp = torch.tensor([[-5.9, -1.0]], dtype=torch.float64, requires_grad=True)
    engine, ref = torch.tensor([[-5.9, -3.0]]).double(), torch.tensor([[0.0, -2.0]]).double()
    kl = unbiased_kl(logp, engine, ref, torch.ones(1, 2))
    kl.sum().backward()
    assert kl[0].tolist() == pytest.approx([math.exp(5.9) - 6.9, math.exp(2.0) * math.exp(-1.0)])
    assert logp.grad[0].tolist() == pytest.approx([-5.9, math.exp(2.0)])


def test_d24_vespo_of_a_row_whose_first_token_is_masked():
    batch = token_inputs([[9.0, math.log(2.0)]], [[0.0, -1.0]], [[0, 1]])
    assert get_policy_loss("vespo")(batch, Actor()).metrics["vespo_weight"].item() == pytest.approx(8 * math.exp(-2.0))
