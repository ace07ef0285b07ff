import pytest
import torch

from alphaapollo.algorithms.advantages.maxrl import maxrl
from alphaapollo.algorithms.group_statistics import Groups


def advantages(*scores: float) -> list[float]:
    """Advantages of one group."""
    return maxrl(torch.tensor(scores, dtype=torch.float64), Groups.from_ids(torch.zeros(len(scores)))).tolist()


def test_by_hand():
    assert advantages(1, 0, 0, 0) == [3, -1, -1, -1]  # (N - K) / K
    assert advantages(1, 1, 1, 0) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
    assert advantages(0.5, 0.25, 0, 0.25) == [1, 0, -1, 0]  # graded rewards


def test_groups_without_variance_or_success_are_0():
    for scores in ((0.0, 0.0), (0.7, 0.7, 0.7), (1.0,), (0.0, -1.0)):
        assert not any(advantages(*scores))
