"""The project computes the vectors of functions that the reference of `alphaapollo verify` does not have.

tests/plugins/verify compares the reference with the other vectors, and the project with the reference.
"""

from __future__ import annotations

import math

import pytest

from tests.golden.check import FUNCTIONS, ITEMS, TOLERANCES, compare, evaluate

NOT_OFFERED = ({"method": "per_turn_sum"}, {"method": "per_turn_sum_loo"}, {"ratio_sg": True})
NAMES = [
    name
    for name, item in ITEMS.items()
    if item["function"] in FUNCTIONS and not any(one.items() <= item["params"].items() for one in NOT_OFFERED)
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_item(name: str, dtype: str) -> None:
    item, tolerance = ITEMS[name], TOLERANCES[dtype]
    results = evaluate(item, tolerance.dtype)
    problems = {key: compare(results[key], expected, tolerance) for key, expected in item["expected"].items()}
    assert not any(problems.values()), problems


def test_each_function_has_vectors() -> None:
    assert {ITEMS[name]["function"] for name in NAMES} == {*FUNCTIONS}


@pytest.mark.parametrize(
    ("got", "is_equal"),
    [([[1.0, math.nan]], True), ([[1.0 + 1e-8, math.nan]], False), ([1.0, math.nan], False), ([[1.0, 0.0]], False)],
)
def test_comparison(got: list[float], is_equal: bool) -> None:
    assert (compare(got, [[1.0, math.nan]], TOLERANCES["float64"]) == "") == is_equal
