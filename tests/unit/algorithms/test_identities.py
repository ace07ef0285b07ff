"""Identities between algorithms, on random batches."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaapollo.algorithms.aggregation import aggregate_sequence_losses, aggregate_token_losses, row_weights
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.config.schema import Actor
from tests.unit.algorithms.batches import with_choice

many = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**31)
ROWS, WIDTH = 6, 5


def random_batch(seed: int, drift: float, constant: bool) -> PolicyLossInputs:
    """Six rows, one of them empty, with gaps in the mask. `constant`: one advantage per row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp = -normal(ROWS, WIDTH).abs() - 0.1
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.7).double()
    mask[:, 0], mask[-1] = 1.0, 0.0
    advantages = normal(ROWS, 1).expand(ROWS, WIDTH) if constant else normal(ROWS, WIDTH)
    old = logp - drift * normal(ROWS, WIDTH)
    return PolicyLossInputs(logp.requires_grad_(), old, advantages * mask, mask)


def loss_and_gradient(
    name: str, batch: PolicyLossInputs, actor: Actor | None = None, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Aggregated with these weights of the rows, or as seq-mean-token-mean, or as a mean over rows."""
    loss = get_policy_loss(name)
    found, lengths = loss(batch, actor or Actor()), batch.mask.sum(1)
    output = found.loss + found.penalty
    if weights is None:
        mode = "seq-mean-token-mean" if loss.level == "token" else "seq-mean-token-sum"
        weights = row_weights(lengths, torch.arange(len(lengths)), mode, 1)
    if loss.level == "token":
        total = aggregate_token_losses(output, batch.mask, weights)
    else:
        total = aggregate_sequence_losses(output, weights)
    (gradient,) = torch.autograd.grad(total, batch.logp)
    return total.detach(), gradient


ON_POLICY = ["ppo", "cispo", "sapo", "gspo", "gspo_token", "gmpo", "dppo_tv", "dppo_kl", "vespo"]


@many
@given(seed=seeds, name=st.sampled_from(ON_POLICY))
def test_losses_share_one_gradient_on_policy(seed: int, name: str):
    batch = random_batch(seed, drift=0.0, constant=True)
    torch.testing.assert_close(loss_and_gradient(name, batch)[1], loss_and_gradient("reinforce", batch)[1])


@many
@given(
    seed=seeds,
    name=st.sampled_from(policy_loss_names()),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "group-mean-token-mean"]),
    size=st.integers(1, ROWS),
    padding=st.integers(0, 3),
)
def test_micro_batches_row_order_and_padding_change_nothing(seed: int, name: str, mode: str, size: int, padding: int):
    loss = get_policy_loss(name)
    batch = with_choice(random_batch(seed, drift=0.3, constant=True), loss, Actor())
    mode = mode if loss.level == "token" else "seq-mean-token-sum"
    weights = row_weights(batch.mask.sum(1), torch.tensor([0, 0, 1, 1, 2, 2]), mode, horizon=WIDTH)
    total, gradient = torch.zeros(()).double(), torch.zeros_like(batch.logp)
    for rows in torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).split(size):
        columns = [batch.logp, batch.old_logp, batch.advantages, batch.mask]
        if batch.selected_tokens is not None:
            columns.append(batch.selected_tokens)
        parts = [torch.nn.functional.pad(column.detach()[rows], (0, padding)) for column in columns]
        part = PolicyLossInputs(parts[0].requires_grad_(), *parts[1:4], selected_tokens=next(iter(parts[4:]), None))
        one, own = loss_and_gradient(name, part, weights=weights[rows])
        total += one
        gradient[rows] = own[:, :WIDTH]
    torch.testing.assert_close((total, gradient), loss_and_gradient(name, batch, weights=weights))
