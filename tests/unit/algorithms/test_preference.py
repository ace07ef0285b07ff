import math

import pytest
import torch

from alphaapollo.algorithms import preference

ONE = torch.tensor([1.0], dtype=torch.float64)
TWO = torch.tensor([2.0], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (preference.dpo(TWO, 0.5), -math.log(sigmoid(1.0))),
        (preference.dpo(TWO, 0.5, 0.1), -0.9 * math.log(sigmoid(1.0)) - 0.1 * math.log(sigmoid(-1.0))),
        (
            preference.robust_dpo(TWO, 0.5, 0.1),
            (-0.9 * math.log(sigmoid(1.0)) + 0.1 * math.log(sigmoid(-1.0))) / 0.8,
        ),
        (preference.ipo(TWO, 0.25), 0.0),  # 1 / (2 tau) = 2
        (preference.ipo(TWO, 0.5), 1.0),
        (preference.hinge(TWO, 0.25), 0.5),
        (preference.hinge(TWO, 1.0), 0.0),
        (preference.slic(TWO, ONE, 3.0), 2.0),
        (
            preference.exo_pair(TWO, 0.5, 0.1),
            sigmoid(1.0) * math.log(sigmoid(1.0) / 0.9) + sigmoid(-1.0) * math.log(sigmoid(-1.0) / 0.1),
        ),
        (
            preference.nca_pair(TWO, ONE, 1.0),
            -math.log(sigmoid(2.0)) - 0.5 * math.log(sigmoid(-2.0)) - 0.5 * math.log(sigmoid(-1.0)),
        ),
        (preference.sppo_hard(TWO, -ONE, 0.5), 1.0),  # (2 - 1)^2 + (-1 + 1)^2
        (preference.apo_zero(TWO, ONE, 1.0), 1.0 - sigmoid(2.0) + sigmoid(1.0)),
        (preference.apo_down(TWO, ONE, 1.0), sigmoid(2.0) + 1.0 - sigmoid(1.0)),
        (preference.kto(TWO, ONE, ONE, 0.5, 3.0, 7.0), 3.0 * (1.0 - sigmoid(0.5))),
        (preference.kto(TWO, 0 * ONE, ONE, 0.5, 3.0, 7.0), 7.0 * (1.0 - sigmoid(-0.5))),
        (preference.kto(TWO, ONE, -ONE, 0.5), 1.0 - sigmoid(1.0)),  # the KL is floored at 0
        (preference.simpo(-ONE, -TWO, 2.0, 0.5), -math.log(sigmoid(1.5))),
        # p_w = 1/2, p_l = 1/4: odds 1 and 1/3
        (
            preference.orpo(torch.log(0.5 * ONE), torch.log(0.25 * ONE), 0.2),
            math.log(2.0) - 0.2 * math.log(sigmoid(math.log(3.0))),
        ),
    ],
)
def test_by_hand(loss: torch.Tensor, expected: float):
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_huge_margins_stay_finite():
    margins = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss = preference.dpo(margins, 1.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([500.0, 0.0])
    assert margins.grad.tolist() == pytest.approx([-1.0, 0.0])


@pytest.mark.parametrize("smoothing", [-0.1, 0.5])
def test_robust_needs_less_than_half(smoothing: float):
    with pytest.raises(ValueError, match="label_smoothing"):
        preference.robust_dpo(ONE, 0.1, smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 1.0])
def test_exo_needs_smoothing(smoothing: float):
    with pytest.raises(ValueError, match="label_smoothing"):
        preference.exo_pair(ONE, 0.1, smoothing)
