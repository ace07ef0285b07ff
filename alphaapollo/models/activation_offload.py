"""Offload of the inputs of recomputed layers to host memory, between the forward and the backward pass.

    forward   compute  | layer 0 | layer 1 | layer 2 | layer 3 |    backward   compute  | layer 3 | layer 2 | ...
              to host            | input 0 | input 1 | input 2 |               to GPU   | input 2 | input 1 | ...

Copies run on two streams of their own. The host waits for none of them. The last input stays, because the backward pass
begins with it. On a CPU, an input is copied within host memory: the same code runs, but nothing is saved.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MAX_LEAVING = 2  # inputs on the GPU whose copies may be incomplete; the next layer waits for older ones


@dataclass(eq=False)
class OffloadedInput:
    """Input of a recomputed layer in host memory."""

    before: OffloadedInput | None  # of the recomputed layer before it, which the backward pass needs next
    host: Tensor  # of the last layer: the input itself, on the device
    device: torch.device
    copied: Any = None  # event after the copy to host memory
    reloaded: tuple[Tensor, Any] | None = None  # the input on the device again, and the event after its copy


class ActivationOffloader:
    """Offloads the inputs of a model's recomputed layers (`make_hooks`). Host buffers are reused."""

    def __init__(self) -> None:
        self._latest: weakref.ref[OffloadedInput] | None = None
        self._leaving = deque[tuple[Tensor, Any]]()  # inputs and the events after their copies
        self._buffers = list[Tensor]()  # pinned, and free
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the host, to the device

    def make_hooks(self, is_first: bool, is_last: bool) -> saved_tensors_hooks:
        """Return the hooks that offload the input of a layer. is_first, is_last: of the model's recomputed layers."""
        before = self._latest() if self._latest and not is_first else None

        def pack(tensor: Tensor) -> OffloadedInput:
            if is_last:
                packed = OffloadedInput(before, tensor, tensor.device)
            else:
                packed = self._offload(tensor, before) if tensor.is_cuda else _copy_on_cpu(tensor, before)
            self._latest = weakref.ref(packed)
            return packed

        return saved_tensors_hooks(pack, self._unpack)

    def _offload(self, tensor: Tensor, before: OffloadedInput | None) -> OffloadedInput:
        self._streams = self._streams or (torch.cuda.Stream(), torch.cuda.Stream())
        compute, (to_host, to_device) = torch.cuda.current_stream(), self._streams
        buffer = self._take_buffer(tensor.nbytes)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        to_host.wait_stream(compute)
        to_host.wait_stream(to_device)  # which may still read the buffer for an earlier pass
        with torch.cuda.stream(to_host):
            host.copy_(tensor, non_blocking=True)
        packed = OffloadedInput(before, host, tensor.device, to_host.record_event())
        weakref.finalize(packed, self._buffers.append, buffer)
        self._leaving.append((tensor, packed.copied))
        self._release(MAX_LEAVING)
        return packed

    def _take_buffer(self, size: int) -> Tensor:
        """Return a pinned buffer. Its size is a power of two, as torch's allocator would make it, so that buffers are
        replaced only a few times."""
        buffer = self._buffers.pop() if self._buffers else None
        if buffer is not None and len(buffer) >= size:
            return buffer
        return torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True)

    def _release(self, count: int) -> None:
        """Free all but `count` offloaded inputs on the GPU. Later computations wait for their copies."""
        while len(self._leaving) > count:
            _, copied = self._leaving.popleft()
            torch.cuda.current_stream().wait_event(copied)

    def _unpack(self, packed: OffloadedInput) -> Tensor:
        """Return the input on the device, and start to reload the one before it."""
        self._release(0)
        self._reload(packed)
        if packed.before is not None:
            self._reload(packed.before)
        assert packed.reloaded is not None
        (tensor, copied), packed.reloaded = packed.reloaded, None
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
        return tensor

    def _reload(self, packed: OffloadedInput) -> None:
        if packed.reloaded is not None:
            return
        if packed.copied is None:
            packed.reloaded = packed.host, None
            return
        assert self._streams is not None
        to_device, tensor = self._streams[1], torch.empty_like(packed.host, device=packed.device)
        to_device.wait_stream(torch.cuda.current_stream())  # which may still use the memory for a freed tensor
        to_device.wait_event(packed.copied)
        with torch.cuda.stream(to_device):
            tensor.copy_(packed.host, non_blocking=True)
        packed.reloaded = tensor, to_device.record_event()


def _copy_on_cpu(tensor: Tensor, before: OffloadedInput | None) -> OffloadedInput:
    return OffloadedInput(before, tensor.clone(), tensor.device)
