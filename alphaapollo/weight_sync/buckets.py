"""Group full tensors into buckets.

At most two buckets of a model exist twice in memory: the one being sent, and the next one, which is being gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from alphaapollo.utils.heartbeat import HEARTBEAT

BUCKET_BYTES = 1 << 29  # minimum size of every bucket except the last

Bucket = dict[str, torch.Tensor]


def make_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[Bucket]:
    """Yield the tensors cast to `dtype`, contiguous, on `device` (None: unchanged), in buckets of about BUCKET_BYTES.
    Every rank that iterates the same tensors gets the same buckets."""
    bucket: Bucket = {}
    for name, tensor in tensors:
        bucket[name] = tensor.detach().to(device or tensor.device, dtype).contiguous()
        if count_bytes(bucket) >= BUCKET_BYTES:
            HEARTBEAT.tick()
            yield bucket
            bucket = {}
    if bucket:
        yield bucket


def prefetch_buckets(source: Iterator[Bucket]) -> Iterator[Bucket]:
    """Yield complete buckets, and gather the next bucket on a separate CUDA stream meanwhile. Every rank enqueues the
    next gather before it sends the current bucket, so all ranks run collectives in one order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the current stream computes the weights

    def start_gather() -> tuple[Bucket | None, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            bucket = next(source, None)
            return bucket, stream.record_event()

    bucket, gathered = start_gather()
    while bucket is not None:
        following = start_gather()
        gathered.synchronize()
        yield bucket
        bucket, gathered = following


def count_bytes(bucket: Bucket) -> int:
    """Return the size of all tensors of a bucket, in bytes."""
    return sum(tensor.nbytes for tensor in bucket.values())
