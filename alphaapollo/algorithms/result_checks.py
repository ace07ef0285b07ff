"""Checks of the results of estimators and losses, built-in or user-defined. They do not synchronize with the GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class InvalidResultError(ValueError):
    """Error for an estimator or loss that returned a value of the wrong type, shape, dtype or content."""


def require(condition: bool, message: str) -> None:
    """Raise InvalidResultError with `message` unless the condition is true."""
    if not condition:
        raise InvalidResultError(message)


def check_type(function: str, result: object, kind: type) -> None:
    """Raise InvalidResultError unless `result`, returned by `function`, is an instance of `kind`."""
    require(isinstance(result, kind), f"{function} must return {kind.__name__}, but returned {type(result).__name__}.")


def check_floats(name: str, value: object, shape: Sequence[int]) -> None:
    """Raise InvalidResultError unless `value` is a floating-point tensor of the shape `shape`."""
    require(isinstance(value, Tensor), f"{name} must be a tensor, but is {type(value).__name__}.")
    assert isinstance(value, Tensor)
    require(value.shape == shape, f"{name} must have the shape {tuple(shape)}, but has {tuple(value.shape)}.")
    require(value.is_floating_point(), f"{name} must be floating point, but is {value.dtype}.")
