"""Identities between algorithms, on random batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.aggregation import aggregate_sequence_losses, aggregate_token_losses, row_weights
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.algorithms.statistics import reward_to_go
from alphaapollo.config.schema import Actor, Algorithm
from tests.unit.algorithms.batches import make_advantage_inputs, with_choice

many = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**31)


def random_batch(seed: int, drift: float, constant: bool) -> PolicyLossInputs:
    """Six rows, one of them empty, with gaps in the mask. `constant`: one advantage per row."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 6, 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp = -normal(rows, width).abs() - 0.1
    mask = (torch.rand(rows, width, generator=generator) < 0.7).double()
    mask[:, 0], mask[-1] = 1.0, 0.0
    advantages = normal(rows, 1).expand(rows, width) if constant else normal(rows, width)
    old = logp - drift * normal(rows, width)
    return PolicyLossInputs(logp.requires_grad_(), old, advantages * mask, mask)


def loss_and_gradient(
    name: str, batch: PolicyLossInputs, actor: Actor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Aggregated as seq-mean-token-mean, or as a mean over rows."""
    loss = get_policy_loss(name)
    output = loss(batch, actor or Actor()).loss
    lengths = batch.mask.sum(1)
    if loss.level == "token":
        weights = row_weights(lengths, torch.arange(len(lengths)), "seq-mean-token-mean", 1)
        total = aggregate_token_losses(output, batch.mask, weights)
    else:
        total = aggregate_sequence_losses(output, row_weights(lengths, lengths, "seq-mean-token-sum", 1))
    (gradient,) = torch.autograd.grad(total, batch.logp)
    return total.detach(), gradient


@many
@given(seed=seeds, size=st.integers(2, 9))
def test_rloo_is_scaled_dr_grpo(seed: int, size: int):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3 * size, generator=generator, dtype=torch.float64)
    groups = torch.arange(3 * size) % 3
    inputs = make_advantage_inputs(scores, groups)
    rloo, dr_grpo = (get_estimator(name)(inputs, Algorithm()).advantages[:, 0] for name in ("rloo", "dr_grpo"))
    torch.testing.assert_close(rloo, size / (size - 1) * dr_grpo)
    # and it is the reward minus the mean of the others
    others = (torch.stack([scores[groups == group].sum() for group in groups]) - scores) / (size - 1)
    torch.testing.assert_close(rloo, scores - others)


@many
@given(seed=seeds, gamma=st.floats(0.0, 1.0))
def test_gae_with_lambda_1_is_return_minus_value(seed: int, gamma: float):
    batch = random_batch(seed, drift=0.0, constant=False)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
    rewards = batch.advantages
    inputs = make_advantage_inputs(rewards.sum(1), torch.arange(6), batch.mask, token_rewards=rewards, values=values)
    result = get_estimator("gae")(inputs, Algorithm(gamma=gamma, lam=1.0, whiten_advantages=False))
    returns = reward_to_go(rewards, batch.mask, gamma)
    torch.testing.assert_close(result.advantages, (returns - values) * batch.mask)
    torch.testing.assert_close(result.returns, returns)


@many
@given(seed=seeds, clip=st.floats(0.01, 0.5))
def test_gspo_is_gspo_token_for_constant_advantages(seed: int, clip: float):
    batch = random_batch(seed, drift=0.5, constant=True)
    actor = Actor(clip_ratio=clip)
    torch.testing.assert_close(*(loss_and_gradient(name, batch, actor) for name in ("gspo", "gspo_token")))


ON_POLICY = ["ppo", "cispo", "sapo", "gspo", "gspo_token", "gmpo", "dppo_tv", "dppo_kl", "vespo"]


@many
@given(seed=seeds, name=st.sampled_from(ON_POLICY))
def test_losses_share_one_gradient_on_policy(seed: int, name: str):
    batch = random_batch(seed, drift=0.0, constant=True)
    _, expected = loss_and_gradient("reinforce", batch)
    _, gradient = loss_and_gradient(name, batch)
    torch.testing.assert_close(gradient, expected)


@many
@given(seed=seeds, name=st.sampled_from(["dppo_tv", "dppo_kl"]))
def test_dppo_without_bounds_is_an_importance_weighted_policy_gradient(seed: int, name: str):
    batch = random_batch(seed, drift=0.5, constant=False)
    value, gradient = loss_and_gradient(name, batch, Actor(clip_ratio=1e9))
    ratio = (batch.logp - batch.old_logp).exp()
    lengths = batch.mask.sum(1)
    weights = row_weights(lengths, torch.arange(len(lengths)), "seq-mean-token-mean", 1)
    expected = aggregate_token_losses(-ratio * batch.advantages, batch.mask, weights)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, batch.logp)[0])


@many
@given(seed=seeds, size=st.integers(2, 9))
def test_maxrl_is_dr_grpo_divided_by_the_group_mean(seed: int, size: int):
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.rand(3 * size, generator=generator) < 0.4).double()
    groups = torch.arange(3 * size) % 3
    inputs = make_advantage_inputs(scores, groups)
    means = torch.stack([scores[groups == group].mean() for group in range(3)])[groups]
    maxrl, dr_grpo = (get_estimator(name)(inputs, Algorithm()).advantages[:, 0] for name in ("maxrl", "dr_grpo"))
    torch.testing.assert_close(maxrl * means, dr_grpo)
    assert not maxrl[means == 0].any()


@many
@given(
    seed=seeds,
    name=st.sampled_from(policy_loss_names()),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "group-mean-token-mean"]),
    size=st.integers(1, 6),
)
def test_micro_batches_and_row_order_cannot_change_a_gradient(seed: int, name: str, mode: str, size: int):
    loss = get_policy_loss(name)
    batch = with_choice(random_batch(seed, drift=0.3, constant=True), loss, Actor())
    lengths = batch.mask.sum(1)
    mode = mode if loss.level == "token" else "seq-mean-token-sum"
    weights = row_weights(lengths, torch.tensor([0, 0, 1, 1, 2, 2]), mode, horizon=5)

    def gradient(parts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(batch.logp)
        for rows in parts:
            part = PolicyLossInputs(
                *(each[rows] for each in (batch.logp, batch.old_logp, batch.advantages, batch.mask)),
                selected_tokens=None if batch.selected_tokens is None else batch.selected_tokens[rows],
            )
            output = loss(part, Actor()).loss
            one = (
                aggregate_token_losses(output, part.mask, weights[rows])
                if loss.level == "token"
                else aggregate_sequence_losses(output, weights[rows])
            )
            total += torch.autograd.grad(one, batch.logp)[0]
        return total

    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(gradient(list(order.split(size))), gradient([torch.arange(6)]))


@pytest.mark.parametrize("name", policy_loss_names())
def test_padding_cannot_change_a_loss(name: str):
    batch = random_batch(5, drift=0.3, constant=True)
    wide = PolicyLossInputs(
        *(torch.nn.functional.pad(each, (0, 3)) for each in (batch.logp, batch.old_logp, batch.advantages, batch.mask))
    )
    batch, wide = (with_choice(one, get_policy_loss(name), Actor()) for one in (batch, wide))
    assert loss_and_gradient(name, batch)[0] == pytest.approx(loss_and_gradient(name, wide)[0].item(), rel=1e-12)
