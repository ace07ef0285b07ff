import pytest
import torch

from alphaapollo.algorithms.aggregation import aggregate_sequence_losses, row_weights

GROUPS = torch.tensor([0, 0, 1, 1])


def test_an_empty_group_is_counted():
    lengths = torch.tensor([4, 2, 0, 0])
    assert row_weights(lengths, GROUPS, "group-mean-token-mean", 10).tolist() == pytest.approx([1 / 12, 1 / 12, 0, 0])


def test_the_constant_normaliser_stays_where_a_sequence_is_left_out():
    kept = row_weights(torch.tensor([4, 2, 2]), torch.zeros(3), "seq-mean-token-sum-norm", 10)
    assert row_weights(torch.tensor([4, 0, 2]), torch.zeros(3), "seq-mean-token-sum-norm", 10)[0] == kept[0]


def test_sequence_level_ignores_empty_rows():
    loss = torch.tensor([3.0, float("nan"), 6.0])
    weights = row_weights(torch.tensor([5, 0, 1]), torch.zeros(3), "seq-mean-token-sum", 1)
    assert aggregate_sequence_losses(loss, weights) == pytest.approx(3.0)
