import math

import pytest

from alphaapollo.algorithms.dynamic_sampling import keep_group


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
    assert keep_group(values) is kept


def test_tolerance():
    assert not keep_group([0.0, 0.1], tolerance=0.1)
    assert keep_group([0.0, 0.11], tolerance=0.1)


def test_nan_is_an_error():
    with pytest.raises(ValueError, match="NaN"):
        keep_group([1.0, math.nan])
