"""The trainer's side of the CPU weight transfer: checkpoints in a shared-memory folder. No vLLM here.

<folder>/v7/00000.safetensors ...       written by one rank of the node, loaded by every engine there, then released
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync.buckets import Batch, batches, num_bytes
from alphaapollo.weight_sync.digest import MODULUS, format_digest, tensors_digest

Part = tuple[Future[None], Future[int]]  # its writing, and its digest


class SharedMemorySender:
    """Writes each published version into its own folder, cast to the engine's dtype.

    `folder` lies under /dev/shm and belongs to one run on one node; `is_writer` is false on the ranks that only take
    part in gathering the tensors.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, is_writer: bool = True):
        self._folder = Path(folder)
        self._dtype = dtype
        self._is_writer = is_writer

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Write (name, whole tensor) pairs, each parameter once, named as in a Hugging Face checkpoint.

        Every rank must iterate `tensors` (gathering a shard is a collective); the writer returns the update, the
        others None. Raises ValueError when the shared memory is too small.
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
        with ThreadPoolExecutor(2) as beside:  # a part is written and summed up while the next is gathered
            part: Part | None = None
            for number, batch in enumerate(batches(tensors, self._dtype, torch.device("cpu"))):
                digest += ended(part)
                path = partial / f"{number:05d}.safetensors"
                part = beside.submit(write_file, batch, path), beside.submit(tensors_digest, batch.values())
            digest += ended(part)
        partial.rename(target)
        return WeightUpdate(version, format_digest(digest % MODULUS), target.name)

    def release(self) -> None:
        """Remove what was sent: the engines have confirmed that they hold it."""
        if self._is_writer:
            shutil.rmtree(self._folder, ignore_errors=True)


def ended(part: Part | None) -> int:
    """The digest of a part, when it is written; 0 of none."""
    if part is None:
        return 0
    written, digest = part
    written.result()
    return digest.result()


def write_file(tensors: Batch, path: Path) -> None:
    """Write safetensors into shared memory. ValueError: there is too little of it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        needed = num_bytes(tensors) / 2**30
        free = shutil.disk_usage(path.parent).free / 2**30
        raise ValueError(
            f"publishing weights through {path.parent} failed ({error}): the next file needs {needed:.2f} GiB, "
            f"{free:.2f} GiB are free. Give the machine more shared memory (docker run --shm-size=...)."
        ) from error
