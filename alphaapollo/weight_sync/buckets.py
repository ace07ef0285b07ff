"""Group a model's tensors into buckets of 0.5 to 2 GiB, to send weights without a full copy of the model.

Every bucket costs some 50 ms of calls, so buckets of large models are larger: their size doubles after 16 buckets.

At most two buckets are in memory in addition to the model: one is being sent while the next one is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from alphaapollo.utils.heartbeat import HEARTBEAT

BUCKET_BYTES = 1 << 29  # minimum size of the first 16 buckets

Bucket = dict[str, torch.Tensor]


def make_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[Bucket]:
    """Yield buckets with the tensors cast to `dtype`, contiguous, on `device` (None: unchanged). A bucket ends with the
    tensor that reaches its size. All ranks that iterate the same tensors get the same buckets."""
    bucket: Bucket = {}
    count = 0
    for name, tensor in tensors:
        bucket[name] = tensor.detach().to(device or tensor.device, dtype).contiguous()
        if count_bytes(bucket) >= get_bucket_bytes(count):
            HEARTBEAT.tick()
            yield bucket
            bucket, count = {}, count + 1
    if bucket:
        yield bucket


def get_bucket_bytes(index: int) -> int:
    """Return the minimum size of a bucket, in bytes. index: number of buckets before it."""
    return BUCKET_BYTES << min(index // 16, 2)


def get_largest_bucket_bytes(total_bytes: int) -> int:
    """Return the minimum size of the largest bucket of a model with `total_bytes`."""
    count = 0
    while total_bytes > get_bucket_bytes(count):
        total_bytes -= get_bucket_bytes(count)
        count += 1
    return get_bucket_bytes(count) if count else total_bytes


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
