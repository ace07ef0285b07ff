"""Whole tensors in parts, so that never more than two parts of a model lie around twice: one that is sent, and the
next, which is gathered meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from alphaapollo.utils.heartbeat import PULSE

BATCH_BYTES = 1 << 29

Batch = dict[str, torch.Tensor]


def batches(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[Batch]:
    """The tensors cast to `dtype`, contiguous, on `device` (None: where they are), in parts of about BATCH_BYTES.

    Every rank that iterates the same tensors gets the same parts.
    """
    batch: Batch = {}
    for name, tensor in tensors:
        batch[name] = tensor.detach().to(device or tensor.device, dtype).contiguous()
        if num_bytes(batch) >= BATCH_BYTES:
            PULSE.beat()
            yield batch
            batch = {}
    if batch:
        yield batch


def ahead(parts: Iterator[Batch]) -> Iterator[Batch]:
    """Parts on the GPU, each when it is whole, while the next one is being gathered on a stream of its own.

    Every rank queues the gathering of a part before it sends the one before, so their collectives keep one order.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which computes the weights

    def begin() -> tuple[Batch | None, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            part = next(parts, None)
            return part, stream.record_event()

    part, gathered = begin()
    while part is not None:
        following = begin()
        gathered.synchronize()
        yield part
        part, gathered = following


def num_bytes(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in batch.values())
