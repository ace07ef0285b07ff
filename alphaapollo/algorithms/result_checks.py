"""Checks of the tensors that estimators and losses return. They do not synchronize with the GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class InvalidResultError(ValueError):
    """An advantage estimator or loss returned a result of the wrong type, shape, dtype or content."""


def require(condition: bool, message: str) -> None:
    """Raise InvalidResultError with `message` unless the condition is true."""
    if not condition:
        raise InvalidResultError(message)


def check_result_type(function: str, result: object, expected: type) -> None:
    """Raise InvalidResultError unless `result`, which `function` returned, has the type `expected`."""
    actual = type(result).__name__
    require(isinstance(result, expected), f"{function} must return {expected.__name__}, but returned {actual}.")


def check_float_tensor(name: str, value: object, shape: Sequence[int]) -> None:
    """Raise InvalidResultError unless `value`, called `name` in the error, is a float tensor of this shape."""
    require(isinstance(value, Tensor), f"{name} must be a tensor, but is {type(value).__name__}.")
    assert isinstance(value, Tensor)
    require(value.shape == shape, f"{name} must have the shape {tuple(shape)}, but has {tuple(value.shape)}.")
    require(value.is_floating_point(), f"{name} must be floating point, but is {value.dtype}.")
