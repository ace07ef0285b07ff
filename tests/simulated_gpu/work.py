"""Count kernels and the bytes of collectives in the operators of the fake GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
WITHOUT_KERNEL = {"alias", "detach", "device", "lift_fresh", "_unsafe_view"} | ALLOCATIONS
COLLECTIVES = {"_allgather_base_": "gathered", "all_gather_into_tensor": "gathered", "_reduce_scatter_base_": "reduced"}


def count_work(work: Counter[str], func: Any, args: Any, made: Any) -> None:
    """Add an operator to the counts. An operator that torch.compile would fuse with others counts as one kernel."""
    name = func._schema.name.split("::")[1]
    tensors = [one for one in tree_leaves((args, made)) if isinstance(one, Tensor) and one.device.type == "cuda"]
    if tensors and not func.is_view and name not in WITHOUT_KERNEL:
        work["kernels"] += 1
    if name in COLLECTIVES:
        work[f"bytes {COLLECTIVES[name]}"] += max(one.nbytes for one in tensors)
