"""Buckets of weights: what every transport sends or writes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from alphaapollo.utils.heartbeat import HEARTBEAT

BUCKET_BYTES = 1 << 30  # minimum size of a bucket; every bucket costs some 50 ms of calls

Bucket = dict[str, torch.Tensor]


def make_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device | None = None,
    min_bytes: int | None = None,
) -> Iterator[Bucket]:
    """Yield buckets with the tensors cast to `dtype`, contiguous, on `device` (None: unchanged). A bucket ends with the
    tensor that reaches `min_bytes` (None: BUCKET_BYTES). All ranks that iterate the same tensors get the same buckets.
    """
    bucket: Bucket = {}
    for name, tensor in tensors:
        bucket[name] = tensor.detach().to(device or tensor.device, dtype).contiguous()
        if count_bytes(bucket) >= (min_bytes or BUCKET_BYTES):
            HEARTBEAT.tick()
            yield bucket
            bucket = {}
    if bucket:
        yield bucket


def prefetch_buckets(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """Yield the buckets, and gather the next bucket on a separate CUDA stream while the caller sends the current one.
    Every rank starts the next gather before it yields, so all ranks run their collectives in the same order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the current stream computes the weights

    def start_gathering_next_bucket() -> tuple[Bucket | None, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            bucket = next(buckets, None)
            return bucket, stream.record_event()

    bucket, gathered = start_gathering_next_bucket()
    while bucket is not None:
        following = start_gathering_next_bucket()
        gathered.synchronize()
        yield bucket
        bucket, gathered = following


def count_bytes(bucket: Bucket) -> int:
    """Return the size of a bucket in bytes."""
    return sum(tensor.nbytes for tensor in bucket.values())
