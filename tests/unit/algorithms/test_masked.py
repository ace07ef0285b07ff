import math

import pytest
import torch

from alphaapollo.algorithms.statistics import (
    apply_mask,
    standardize,
)

# Row 0: two actions, an observation, an action. Row 1: empty.
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]])


def matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_masked_drops_nan_in_value_and_gradient():
    values = matrix([1.0, 2.0, math.nan, 4.0], [math.inf] * 4).requires_grad_()
    apply_mask(values, MASK).sum().backward()
    assert apply_mask(values, MASK).tolist() == [[1.0, 2.0, 0.0, 4.0], [0.0] * 4]
    assert values.grad.tolist() == [[1.0, 1.0, 0.0, 1.0], [0.0] * 4]


def test_standardised_by_hand():
    # mean 2, squares 1 + 0 + 1; var 1 with ddof 1
    assert standardize(torch.tensor([1.0, 2.0, 3.0]), ddof=1, eps=0.0).tolist() == [-1.0, 0.0, 1.0]
    for eps_in_sqrt, largest in ((True, 0.5), (False, 0.25)):
        values = standardize(torch.tensor([1.0, 2.0, 3.0]), ddof=1, eps=3.0, eps_in_sqrt=eps_in_sqrt)
        assert values.tolist() == [-largest, 0.0, largest]


@pytest.mark.parametrize("values", [[], [3.0], [0.7] * 8])
def test_standardised_without_spread_is_exactly_zero(values: list[float]):
    assert not standardize(torch.tensor(values), ddof=1, eps=0.0).any()
