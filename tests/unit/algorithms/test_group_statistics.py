import math

import pytest
import torch

from alphaapollo.algorithms.statistics import Groups, has_variance

IDS = torch.tensor([7, 9, 7, 9, 4])  # groups 4, 7, 9 in this order: one, two and two samples
SCORES = torch.tensor([1.0, 5.0, 3.0, 5.0, 8.0], dtype=torch.float64)


def test_statistics_by_group():
    groups = Groups.from_ids(IDS)
    assert groups.group_index.tolist() == [1, 2, 1, 2, 0]
    assert groups.sum(SCORES).tolist() == [8.0, 4.0, 10.0]
    assert groups.mean(SCORES).tolist() == [8.0, 2.0, 5.0]
    assert groups.max(SCORES).tolist() == [8.0, 3.0, 5.0]
    assert groups.is_constant(SCORES).tolist() == [True, False, True]
    assert groups.std(SCORES, ddof=1).tolist() == pytest.approx([0.0, math.sqrt(2.0), 0.0])
    assert groups.std(SCORES, ddof=0).tolist() == [0.0, 1.0, 0.0]
    assert Groups.from_ids(torch.tensor([0, 0])).max(torch.tensor([-3.0, -2.0])).tolist() == [-2.0]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1.0, 0.0, 0.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([0.1] * 3, False),  # the standard deviation of these is not 0 in floating point
        ([0.5], False),
        ([], False),
    ],
)
def test_keep_group(values: list[float], kept: bool):
    assert has_variance(values) is kept


def test_keep_group_with_a_tolerance_and_nan_is_an_error():
    assert not has_variance([0.0, 0.1], tolerance=0.1)
    assert has_variance([0.0, 0.11], tolerance=0.1)
    with pytest.raises(ValueError, match="NaN"):
        has_variance([1.0, math.nan])
