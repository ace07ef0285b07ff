"""Errors of widespread implementations that this project avoids, with numbers.

D1 .. D24 are the rows of the table "Differences from other implementations" in docs/algorithms/README.md. Other tests
have some of them in their tables:

golden vectors                       D3 and D16 (a group without variance), D7 (extreme ratios), D18
../verification                      D6, D12, D17 (one row is empty), D24 (and others have a masked first token)
test_preference_losses.py            D13, D14, D15
advantages/test_estimators.py        D16, D20 (returns)
trainer/setup/test_combinations.py   D21
test_custom.py                       D22
"""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from alphaapollo.algorithms.adaptive_coefficients import next_kl_coef
from alphaapollo.algorithms.advantages import AdvantageInputs, get_estimator
from alphaapollo.algorithms.aggregation import aggregate_sequence_losses, aggregate_token_losses, row_weights
from alphaapollo.algorithms.kl import subtract_kl, unbiased_kl
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.algorithms.statistics import has_variance
from alphaapollo.config.schema import Actor, AggregationMode, Algorithm, KLControl
from tests.unit.algorithms.batches import GROUP_ESTIMATORS, make_advantage_inputs, make_complete_inputs


def advantages(name: str, inputs: AdvantageInputs, **options: object) -> torch.Tensor:
    return get_estimator(name)(inputs, Algorithm(**options)).advantages


def token_inputs(log_ratios: list[list[float]], adv: list[list[float]], mask: list[list[int]]) -> PolicyLossInputs:
    logp = torch.tensor(log_ratios, requires_grad=True)
    return PolicyLossInputs(logp, torch.zeros_like(logp), torch.tensor(adv), torch.tensor(mask, dtype=torch.float32))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_d1_equal_rewards_have_zero_advantage_beside_other_groups(name: str, dtype: torch.dtype):
    """Rewards of 0.1, 0.2 and 0.3 minus their mean do not add up to exactly 0, nor do eight rewards of 0.7."""
    for equal, third in ((0.7, 0.1), (0.1, 0.3), (0.3, 0.7)):
        scores = [equal] * 8 + [0.1, 0.2, third]
        if name == "grpo_passk_analytic":
            scores = [1.0] * 8 + [1.0, 0.0, 0.0]
        inputs = make_complete_inputs(scores, [0] * 8 + [1] * 3, torch.ones(11, 1, dtype=dtype))
        found = advantages(name, inputs, passk_k=2)
        assert not found[:8].any() and found[8:].any()
        assert not has_variance([equal] * 3)


def test_d2_reward_on_a_masked_token_is_kept():
    mask = torch.tensor([[1.0, 1.0, 0.0]])  # the last attended token is a tool's answer
    rewards = torch.tensor([[0.0, 0.0, 1.0]])  # an environment that put it there all the same
    others = {"values": torch.zeros(1, 3), "greedy_rewards": torch.zeros(1)}
    inputs = make_advantage_inputs([1.0], [0], mask, token_rewards=rewards, **others)
    for name in ("gae", "reinforce_plus_plus", "remax"):
        assert get_estimator(name)(inputs, Algorithm()).returns.tolist() == [[1.0, 1.0, 0.0]]


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


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_d11_a_group_of_one_has_no_advantage(name: str):
    inputs = make_complete_inputs([1.0, 0.0, 1.0], [0, 0, 1], torch.ones(3, 1))
    assert advantages(name, inputs, passk_k=1)[2] == 0.0


def test_d19_kl_control_uses_the_kl_per_sequence():
    # 4 tokens of 2 nats: 8 a sequence, above a target of 6, though 2 a token is below
    ones = torch.ones(4)
    shaped = subtract_kl(torch.zeros(4), 2 * ones, torch.zeros(4), ones, torch.tensor([4]), coef=0.1)
    assert shaped.kl_per_sequence == 8.0
    control = KLControl(type="adaptive", target_kl=6.0, horizon=100.0)
    assert next_kl_coef(control, 0.1, shaped.kl_per_sequence.item(), 1) > 0.1


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_d20_a_trajectory_counts_once_however_many_turns_it_has(name: str):
    """A trajectory with two rows has the same weight as one with a single row and the same tokens."""

    def first_tokens(mask: list[list[int]], owners: list[int]) -> list[float]:
        scores, groups = ([values[own] for own in owners] for values in ([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 1]))
        inputs = make_complete_inputs(scores, groups, torch.tensor(mask, dtype=torch.float64), owners)
        inputs = replace(inputs, token_rewards=torch.zeros_like(inputs.mask))
        return advantages(name, inputs, passk_k=1)[:, 0].tolist()

    rows = [[1, 1, 0], [1, 1, 0], [1, 0, 0]]
    one = first_tokens([[1, 1, 1], *rows], [0, 1, 2, 3])
    split = first_tokens([[1, 0, 0], [1, 1, 0], *rows, [0, 0, 0]], [0, 0, 1, 2, 3, 3])
    assert split[:4] == [one[0], one[0], one[1], one[2]]


def test_d23_the_unbiased_kl_has_the_ratio_of_the_token_and_no_clamp():
    logp = torch.tensor([[-5.9, -1.0]], dtype=torch.float64, requires_grad=True)
    engine, ref = torch.tensor([[-5.9, -3.0]]).double(), torch.tensor([[0.0, -2.0]]).double()
    kl = unbiased_kl(logp, engine, ref, torch.ones(1, 2))
    kl.sum().backward()
    assert kl[0].tolist() == pytest.approx([math.exp(5.9) - 6.9, math.exp(2.0) * math.exp(-1.0)])
    assert logp.grad[0].tolist() == pytest.approx([-5.9, math.exp(2.0)])
