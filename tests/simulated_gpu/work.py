"""Count kernels and the bytes of collectives in the operators of the fake GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
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


def describe_blocking_copy(pinned: Set[int], target: Tensor, source: Tensor, non_blocking: bool = False) -> str:
    """Describe a copy between GPU and host memory for which the host waits; "" for any other copy. pinned: addresses of
    pinned storages."""
    host, device = (source, target) if target.device.type == "cuda" else (target, source)
    is_other = (host.device.type, device.device.type) != ("cpu", "cuda") or host.numel() == 1
    if is_other or (non_blocking and host.untyped_storage()._cdata in pinned):
        return ""
    return f"copy {'from' if host is source else 'to'} pageable memory"


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without modes: device meshes read real tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
