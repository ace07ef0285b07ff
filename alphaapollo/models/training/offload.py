"""Offload a model's tensors to host memory, so that another model or an engine can use the GPU.

An offloaded tensor loses its storage but remains the same object, so FSDP's views of a parameter and the optimizer's
references remain valid. Computing with an offloaded tensor crashes the process, so its owner must reload it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.models.sharding import local_tensor


class TensorOffloader:
    """Moves a set of tensors to host memory and back.

    Args:
        list_tensors: returns the tensors to offload; called at each offload. The host buffers of tensors that were
            returned the last time are reused.
        enabled: false = the tensors stay on the device.
    """

    def __init__(self, list_tensors: Callable[[], Iterable[Tensor]], enabled: bool):
        self.enabled = enabled
        self._list_tensors = list_tensors
        self._copies: dict[int, _HostCopy] = {}  # keys: storages on the device

    def reload(self) -> None:
        """Move offloaded tensors back to the device, asynchronously. A second call does nothing."""
        for copy in self._copies.values():
            copy.reload()

    def offload(self) -> None:
        """Move all tensors to host memory. A second call does nothing."""
        if not self.enabled:
            return
        found = (local_tensor(tensor.detach()).untyped_storage() for tensor in self._list_tensors())
        storages = {storage._cdata: storage for storage in found}
        copies = {key: self._copies.get(key) or _HostCopy(storage) for key, storage in storages.items()}
        for copy in copies.values():
            copy.copy_to_host()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies must be complete before the memory is freed
        for storage in storages.values():
            storage.resize_(0)
        self._copies = copies


def make_parameter_offloader(model: nn.Module | None, enabled: bool) -> TensorOffloader:
    """Create the offloader of a model's parameters. LoRA adapters stay on the device, for weight syncs. It is
    disabled if the parameters are not on a GPU."""
    named = model.named_parameters() if model else ()
    parameters = [parameter for name, parameter in named if not is_adapter_parameter(name)]
    return TensorOffloader(lambda: parameters, enabled and any(parameter.is_cuda for parameter in parameters))


class _HostCopy:
    """Copy of a device tensor's storage in host memory, page-locked if the device is a GPU."""

    def __init__(self, storage: torch.UntypedStorage):
        self._storage = storage
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8)
        if storage.device.type == "cuda":
            lock_pages(self._host)

    def copy_to_host(self) -> None:
        if self._storage.nbytes():
            self._host.copy_(self._view_storage(), non_blocking=True)

    def reload(self) -> None:
        if self._storage.nbytes() < self._host.numel():
            self._storage.resize_(self._host.numel())
            self._view_storage().copy_(self._host, non_blocking=True)

    def _view_storage(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)


def lock_pages(host_tensor: Tensor) -> None:
    """Page-lock the memory of a CPU tensor until the tensor is deleted.

    torch's pinned allocator would round each tensor up to a power of two, so a model would take a third more memory.
    """
    if host_tensor.numel():
        cuda, address = torch.cuda.cudart(), host_tensor.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(address, host_tensor.nbytes, 0))
        weakref.finalize(host_tensor, cuda.cudaHostUnregister, address).atexit = False
