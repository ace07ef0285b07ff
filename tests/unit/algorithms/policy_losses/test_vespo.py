import math

import pytest
import torch

from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.algorithms.policy_losses.gspo import vespo_weight
from alphaapollo.config.schema import Actor
from alphaapollo.config.schema import PolicyLossOptions as Options


@pytest.mark.parametrize(("ratio", "positive", "negative"), [(1.0, 1.0, 1.0), (2.0, 0.199, 1.083), (0.5, 1.12, 0.34)])
def test_weights_of_the_paper(ratio: float, positive: float, negative: float):
    log_w = torch.full((2,), math.log(ratio))
    weights = vespo_weight(log_w, torch.tensor([1.0, -1.0]), (2.0, 3.0), (3.0, 2.0))
    assert weights.tolist() == pytest.approx([positive, negative], abs=5e-3)


@pytest.mark.parametrize("log_w", [-800.0, 800.0])
def test_an_extreme_ratio_has_weight_0(log_w: float):
    for sign in (1.0, -1.0):
        assert vespo_weight(torch.tensor(log_w), torch.tensor(sign), (2.0, 3.0), (3.0, 2.0)) == 0.0


def test_the_ratio_is_the_product_over_the_row():
    """Ratios 2 and 1/4, and a masked token in front: W = 1/2. The kernel is that of the row's advantage."""
    d = torch.tensor([[0.7, math.log(2.0), math.log(0.25)]] * 2, dtype=torch.float64)
    logp = (d - 1.0).requires_grad_()
    mask = torch.tensor([[0.0, 1.0, 1.0]] * 2, dtype=torch.float64)
    advantages = torch.tensor([[0.0, 2.0, 2.0], [0.0, -2.0, -2.0]], dtype=torch.float64)
    output = get_policy_loss("vespo")(PolicyLossInputs(logp, -torch.ones_like(d), advantages, mask), Actor())
    (output.loss * mask).sum().backward()
    positive, negative = 0.25 * math.exp(1.5), 0.125 * math.exp(1.0)
    assert logp.grad.tolist() == [
        pytest.approx([0.0, -2 * positive, -2 * positive]),
        pytest.approx([0.0, 2 * negative, 2 * negative]),
    ]
    assert output.metrics["vespo_weight"].item() == pytest.approx(2 * positive + 2 * negative)


def test_kernels_of_the_config():
    ones = torch.ones(1, 1, dtype=torch.float64)
    batch = PolicyLossInputs(math.log(2.0) * ones - 1.0, -ones, ones, ones)
    actor = Actor(policy_loss=Options(vespo_positive=(1.0, 0.0)))  # the importance ratio itself
    assert get_policy_loss("vespo")(batch, actor).metrics["vespo_weight"].item() == pytest.approx(2.0)
