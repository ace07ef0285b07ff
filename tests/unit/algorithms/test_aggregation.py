from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaapollo.algorithms.aggregation import aggregate_sequence_losses, aggregate_token_losses, row_weights
from alphaapollo.config.schema import AggregationMode

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


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    mode=st.sampled_from(get_args(AggregationMode)),
    cut=st.integers(0, 8),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_micro_batches_ranks_order_and_padding_change_nothing(
    lengths: list[int], mode: str, cut: int, padding: int, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), 6
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).double()
    loss = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weights = row_weights(mask.sum(1), torch.arange(rows) // 2, mode, horizon=width)
    whole = aggregate_token_losses(loss, mask, weights)
    order = torch.randperm(rows, generator=generator)
    wider = [torch.nn.functional.pad(each, (0, padding)) for each in (loss, mask)]
    for_part = [aggregate_token_losses(*(x[part] for x in (*wider, weights))) for part in (order[:cut], order[cut:])]
    torch.testing.assert_close(sum(for_part), whole)
