"""torchao's AdamW with moments of 8 bits, an optional dependency."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit


def make_adamw_8bit(groups: list[dict[str, object]], lr: float, on_gpu: bool) -> torch.optim.Optimizer:
    """Create AdamW with block-wise quantized moments (arXiv 2110.02861). On a CPU its steps are not compiled."""
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr)
    if not on_gpu:
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)  # type: ignore[method-assign]
    return optimizer


@OptimState8bit.implements(torch.ops.aten.new_empty.default)
def _new_empty(func: Any, types: Any, args: Iterable[Any], kwargs: dict[str, object]) -> Tensor:
    """Create a tensor for torch's background checkpoint writer, which then copies codes and scales into it."""
    moments, shape = args
    empty: Tensor = OptimState8bit.zeros(shape, moments.signed, moments.block_size, kwargs["device"], moments.dtype)
    return empty
