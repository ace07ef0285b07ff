import pytest
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, get_estimator
from alphaapollo.algorithms.advantages.maxrl import maxrl
from alphaapollo.algorithms.group_statistics import Groups
from alphaapollo.config.schema import Algorithm


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


def test_a_negative_reward_is_an_error():
    scores = torch.tensor([1.0, -1.0])
    ids = torch.arange(2)
    inputs = AdvantageInputs(scores.unsqueeze(1), torch.ones(2, 1), scores, torch.zeros(2, dtype=torch.int64), ids)
    with pytest.raises(ValueError, match=r"needs rewards of at least 0, but got -1\. Return 0 for a wrong answer"):
        get_estimator("maxrl")(inputs, Algorithm())
