"""Errors of advantage estimators and losses that users register in their own files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from alphaapollo.utils.user_module import format_error


@contextmanager
def explain_user_errors(function: Callable[..., object], label: str) -> Iterator[None]:
    """Context manager: convert any error of a user's function to a one-line ValueError that names its file.

    label: e.g. "the policy loss 'mine'".
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's code may raise anything
        if function.__module__.startswith("alphaapollo."):
            raise
        file = Path(inspect.getsourcefile(function) or "?")
        raise ValueError(f"{file}: {label} failed: {format_error(error, file)}. Fix {function.__name__}().") from error


def check_float_tensor(name: str, value: object, shape: Sequence[int]) -> None:
    """Raise ValueError unless `value`, called `name` in the error, is a float tensor of this shape. Does not
    synchronize with the GPU."""
    if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
        found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a float tensor of shape {tuple(shape)}, but got {found}")
