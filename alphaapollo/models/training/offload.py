"""Tensors that share a GPU by phases: on the device while their owner works, in host memory while another does.

    reload()   memory on the device, filled from the host copy
    rest()    copied to the host, and the memory on the device given back

A tensor that rests has no memory, but stays the same object: FSDP's views of a parameter and the optimizer's
references hold across phases. To compute with one that rests ends the process, so its owner fetches before it works.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from alphaapollo.models.sharding import local_tensor


class Offload:
    """Takes the tensors that `tensors` names at each rest; the same ones keep their host copies. Not `enabled`, they
    stay on the device."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], enabled: bool):
        self.enabled = enabled
        self._tensors = tensors
        self._homes: dict[int, _Home] = {}  # by the storage that they are a copy of

    def reload(self) -> None:
        """What rests comes back; a second call does nothing. The copies are queued, not waited for."""
        for home in self._homes.values():
            home.reload()

    def offload(self) -> None:
        """Everything to the host; a second call does nothing."""
        if not self.enabled:
            return
        storages = {storage._cdata: storage for storage in map(_storage, self._tensors())}
        homes = {key: self._homes.get(key) or _Home(storage) for key, storage in storages.items()}
        for home in homes.values():
            home.save()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # before the memory is anybody else's
        for home in homes.values():
            home.free()
        self._homes = homes


def parameter_offload(model: nn.Module | None, wanted: bool) -> Offload:
    """Of a sharded model's parameters. Void where they are not on a GPU: FSDP's own policy keeps them in host memory,
    and a machine without GPUs has no other."""
    parameters = list(model.parameters()) if model else []
    return Offload(lambda: parameters, wanted and any(parameter.is_cuda for parameter in parameters))


class _Home:
    """One storage and its copy in host memory, page-locked where there is a GPU."""

    def __init__(self, storage: torch.UntypedStorage):
        self._storage = storage
        self._host = host_bytes(storage.nbytes(), pin=storage.device.type == "cuda")

    def save(self) -> None:
        if self._storage.nbytes():
            self._host.copy_(self._on_device(), non_blocking=True)

    def free(self) -> None:
        self._storage.resize_(0)

    def reload(self) -> None:
        if self._storage.nbytes() < self._host.numel():
            self._storage.resize_(self._host.numel())
            self._on_device().copy_(self._host, non_blocking=True)

    def _on_device(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)


def host_bytes(count: int, pin: bool) -> Tensor:
    """uint8 [count] in host memory."""
    host = torch.empty(count, dtype=torch.uint8)
    if pin:
        lock_pages(host, owner=host)
    return host


def lock_pages(host: Tensor, owner: Tensor) -> None:
    """Page-lock a tensor in host memory for as long as `owner` lives. In place rather than by torch's own pinned
    allocator, which rounds each tensor up to a power of two: a third more memory for a model."""
    if host.numel():
        cuda, address = torch.cuda.cudart(), host.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(address, host.nbytes, 0))
        weakref.finalize(owner, cuda.cudaHostUnregister, address).atexit = False


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor.detach()).untyped_storage()
