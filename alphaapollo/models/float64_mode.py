"""float64 arithmetic for modeling code that casts to float32, used by replays (trainer/replay/)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64Mode(TorchFunctionMode):
    """Context manager in which casts of tensors to float32 return float64. Transformers' norms, rotary embeddings and
    softmaxes have such casts.

    The dtype of new tensors does not change. A backward pass needs this context only with gradient checkpointing,
    which recomputes layers.
    """

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_view = function is Tensor.view  # view(dtype) reinterprets bytes
        if args and isinstance(args[0], Tensor) and not is_view:
            if function is Tensor.float:
                return args[0].double(**kwargs)
            args = tuple(map(_replace_dtype, args))
            kwargs = {name: _replace_dtype(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _replace_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
