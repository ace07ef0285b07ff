"""Comparison of a recorded update's tensors with those of the reference."""

from __future__ import annotations

import math

import pytest
import torch

from alphaapollo.plugins.verify.steps import compare_tensors, find_weight

ZERO, ONE = {"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.ones(2), "b": torch.zeros(3)}


@pytest.mark.parametrize("name", ["gradient of step 1", "critic: weights"])
def test_tensors_of_zeros_compare_nothing(name: str) -> None:
    check = compare_tensors(name, ZERO, ZERO, 1e-3, "relative")
    assert check.verdict == "not covered" and check.reason in ("every gradient is 0", "every change is 0")
    assert compare_tensors(name, ONE, ONE, 1e-3, "relative").verdict == "ok"
    for recorded, reference in ((ONE, ZERO), (ZERO, ONE), ({**ONE, "a": torch.full((2,), math.nan)}, ONE)):
        check = compare_tensors(name, recorded, reference, 1e-3, "relative")
        assert (check.verdict, check.where) == ("FAILED", "a")


def test_tensors_of_another_model_are_refused() -> None:
    other = {"a": torch.ones(1), "b": torch.zeros(3)}
    assert compare_tensors("gradient", other, ONE, 1e-3, "").deviation == math.inf
    for name in ("a", "c"):
        with pytest.raises(ValueError, match=rf"no weight {name} \[1\]"):
            find_weight(ONE, name, torch.ones(1))
