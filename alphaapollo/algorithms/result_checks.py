"""Checks of what estimators and losses return, built-in or user-defined. None of them waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class InvalidResultError(ValueError):
    """An estimator or a loss returned a value of the wrong type, shape, dtype or content."""


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidResultError(problem)


def check_type(function: str, result: object, kind: type) -> None:
    """Raise InvalidResultError unless `function` returned this type."""
    require(isinstance(result, kind), f"{function} must return {kind.__name__}, but returned {type(result).__name__}.")


def check_floats(what: str, value: object, shape: Sequence[int]) -> None:
    """Raise InvalidResultError unless `value` is a floating-point tensor of this shape."""
    require(isinstance(value, Tensor), f"{what} must be a tensor, but is {type(value).__name__}.")
    assert isinstance(value, Tensor)
    require(value.shape == shape, f"{what} must have the shape {tuple(shape)}, but has {tuple(value.shape)}.")
    require(value.is_floating_point(), f"{what} must be floating point, but is {value.dtype}.")
