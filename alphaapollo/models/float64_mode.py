"""Arithmetic in float64 where a model's own code asks for float32: for replays (trainer/replay/)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64Mode(TorchFunctionMode):
    """Within, what is made of a tensor is float64 where float32 is asked for: transformers' norms, rotations and
    softmaxes ask so. What is made of nothing stays as asked: a step counter, say. Backward passes follow the forward;
    a recomputation in one of them (gradient checkpointing) would be outside."""

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        renames = function is Tensor.view  # bytes: view(dtype)
        if args and isinstance(args[0], Tensor) and not renames:
            if function is Tensor.float:
                return args[0].double(**kwargs)
            args = tuple(map(_doubled, args))
            kwargs = {name: _doubled(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
