"""Group full tensors into buckets, so that at most two buckets of a model exist twice in memory: the one being sent and
the next one, which is gathered meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from alphaapollo.utils.heartbeat import HEARTBEAT

BUCKET_BYTES = 1 << 29

Bucket = dict[str, torch.Tensor]


def make_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[Bucket]:
    """Yield the tensors cast to `dtype`, contiguous, on `device` (None: unchanged), in buckets of about BUCKET_BYTES.

    Every rank that iterates the same tensors gets the same buckets.
    """
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
    """Yield each bucket when it is complete on the GPU, while the next one is gathered on a separate stream.

    Every rank enqueues the next gather before it sends the current bucket, so collectives keep one order on all ranks.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which computes the weights

    def begin() -> tuple[Bucket | None, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            bucket = next(source, None)
            return bucket, stream.record_event()

    bucket, gathered = begin()
    while bucket is not None:
        following = begin()
        gathered.synchronize()
        yield bucket
        bucket, gathered = following


def count_bytes(bucket: Bucket) -> int:
    return sum(tensor.nbytes for tensor in bucket.values())
