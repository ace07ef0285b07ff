"""Trainer side of the CPU weight transfer: checkpoints in a shared-memory folder.

<folder>/v7/00000.safetensors ...       written by one rank of a node, loaded by every engine of that node, then removed
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync.buckets import Bucket, make_buckets, num_bytes
from alphaapollo.weight_sync.digest import MODULUS, format_digest, tensors_digest

PendingBucket = tuple[Future[None], Future[int]]  # write, digest


class SharedMemorySender:
    """Writes each published version into its own folder, cast to the engine's dtype.

    `folder` is a folder below /dev/shm that belongs to one run on one node. `is_writer` is false on ranks that only
    take part in gathering the tensors.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, is_writer: bool = True):
        self._folder = Path(folder)
        self._dtype = dtype
        self._is_writer = is_writer

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Write (name, full tensor) pairs, each parameter once, named as in a Hugging Face checkpoint.

        Every rank must iterate `tensors` (gathering a shard is a collective). The writer returns the update, the other
        ranks None. Raises ValueError when shared memory is too small.
        """
        if not self._is_writer:
            for _ in tensors:
                pass
            return None
        self.release()
        target = self._folder / f"v{version}"
        partial = self._folder / f".v{version}"
        partial.mkdir(parents=True)
        digest = 0
        with ThreadPoolExecutor(2) as pool:  # a bucket is written and hashed while the next one is gathered
            pending: PendingBucket | None = None
            for number, bucket in enumerate(make_buckets(tensors, self._dtype, torch.device("cpu"))):
                digest += finish_bucket(pending)
                path = partial / f"{number:05d}.safetensors"
                pending = pool.submit(write_file, bucket, path), pool.submit(tensors_digest, bucket.values())
            digest += finish_bucket(pending)
        partial.rename(target)
        return WeightUpdate(version, format_digest(digest % MODULUS), target.name)

    def release(self) -> None:
        """Remove the files of the last update, which every engine has confirmed."""
        if self._is_writer:
            shutil.rmtree(self._folder, ignore_errors=True)


def finish_bucket(pending: PendingBucket | None) -> int:
    """Wait until a bucket is written and return its digest; 0 if there is none."""
    if pending is None:
        return 0
    written, digest = pending
    written.result()
    return digest.result()


def write_file(tensors: Bucket, path: Path) -> None:
    """Write tensors to a safetensors file in shared memory. Raises ValueError when there is too little of it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        needed = num_bytes(tensors) / 2**30
        free = shutil.disk_usage(path.parent).free / 2**30
        raise ValueError(
            f"publishing weights through {path.parent} failed ({error}): the next file needs {needed:.2f} GiB, "
            f"{free:.2f} GiB are free. Increase shared memory (docker run --shm-size=...)."
        ) from error
