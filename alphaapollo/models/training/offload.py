"""Offloading of tensors to host memory between phases, which lets several roles share a GPU.

An offloaded tensor loses its storage but remains the same object, so FSDP's views of a parameter and the optimizer's
references remain valid. Computing with an offloaded tensor crashes the process, so its owner must reload it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from alphaapollo.models.sharding import local_tensor


class TensorOffloader:
    """Offloader of a set of tensors. A tensor keeps its host copy as long as each call of `tensors` returns the tensor.

    Args:
        tensors: returns the tensors to offload; called at each offload.
        enabled: false = the tensors stay on the device.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], enabled: bool):
        self.enabled = enabled
        self._tensors = tensors
        self._copies: dict[int, _HostCopy] = {}  # keys: storages on the device

    def reload(self) -> None:
        """Bring offloaded tensors back, asynchronously. A second call does nothing."""
        for copy in self._copies.values():
            copy.reload()

    def offload(self) -> None:
        """Move all tensors to host memory. A second call does nothing."""
        if not self.enabled:
            return
        found = (local_tensor(tensor.detach()).untyped_storage() for tensor in self._tensors())
        storages = {storage._cdata: storage for storage in found}
        copies = {key: self._copies.get(key) or _HostCopy(storage) for key, storage in storages.items()}
        for copy in copies.values():
            copy.save()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies must be complete before the memory is freed
        for copy in copies.values():
            copy.free()
        self._copies = copies


def make_parameter_offloader(model: nn.Module | None, enabled: bool) -> TensorOffloader:
    """Create the offloader of a sharded model's parameters. It is disabled if the parameters are not on a GPU."""
    parameters = list(model.parameters()) if model else []
    return TensorOffloader(lambda: parameters, enabled and any(parameter.is_cuda for parameter in parameters))


class _HostCopy:
    """Host copy of a storage on the device, page-locked if the device is a GPU."""

    def __init__(self, storage: torch.UntypedStorage):
        self._storage = storage
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8)
        if storage.device.type == "cuda":
            lock_pages(self._host)

    def save(self) -> None:
        if self._storage.nbytes():
            self._host.copy_(self._view_storage(), non_blocking=True)

    def free(self) -> None:
        self._storage.resize_(0)

    def reload(self) -> None:
        if self._storage.nbytes() < self._host.numel():
            self._storage.resize_(self._host.numel())
            self._view_storage().copy_(self._host, non_blocking=True)

    def _view_storage(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)


def lock_pages(host: Tensor) -> None:
    """Page-lock a tensor in host memory as long as it lives.

    torch's pinned allocator would round each tensor up to a power of two, a third more memory for a model.
    """
    if host.numel():
        cuda, address = torch.cuda.cudart(), host.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(address, host.nbytes, 0))
        weakref.finalize(host, cuda.cudaHostUnregister, address).atexit = False
