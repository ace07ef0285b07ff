"""Compute in float64 what models compute in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64Mode(TorchFunctionMode):
    """Context manager in which casts of tensors to float32 return float64, e.g. in transformers' norms, rotary
    embeddings and softmaxes. The dtype of new tensors does not change.

    With gradient checkpointing, which recomputes layers, the backward pass needs this context, too.
    """

    def __torch_function__(
        self, function: Callable[..., object], _: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        is_view = function is Tensor.view  # view(dtype) reinterprets bytes
        if args and isinstance(args[0], Tensor) and not is_view:
            if function is Tensor.float:
                return args[0].double(**kwargs)
            args = tuple(map(_replace_float32, args))
            kwargs = {name: _replace_float32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _replace_float32(value: object) -> object:
    return torch.float64 if value is torch.float32 else value
