"""Whole tensors in parts, so that never more than one part of a model lies around twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

BATCH_BYTES = 1 << 30

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
            yield batch
            batch = {}
    if batch:
        yield batch


def num_bytes(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in batch.values())
