"""Background checkpoint writer: it copies the state into host memory, and a thread writes the copy.

    start: copy --> training continues
             `-- thread: write files --> pending() is done

The thread's collectives use a process group of their own, so that they do not mix with those of training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.models.checkpoint.snapshot import Snapshot, write_snapshot
from alphaapollo.models.sharding import COLLECTIVE_TIMEOUT, local_tensor
from alphaapollo.models.training.offload import lock_pages


class CheckpointWriter:
    """Write the checkpoints of one rank, one at a time. All ranks start the same checkpoints.

    Args:
        in_background: write a copy while training continues; else `start` returns when the files are written.
    """

    def __init__(self, in_background: bool):
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._copies = HostCopies()
        self._written: Future[float] = Future()
        self._written.set_result(0.0)

    def start(self, parts: Sequence[Snapshot]) -> None:
        """Write the parts of a checkpoint (a collective). The previous one must be complete."""
        assert self._written.done(), "one checkpoint at a time"
        if self._thread is None:
            seconds = self._write(parts)
            self._written = Future()
            self._written.set_result(seconds)
            return
        copied = [replace(part, tensors=self._copies.take(part.tensors, (n,))) for n, part in enumerate(parts)]
        self._copies.wait()
        self._written = self._thread.submit(self._write, copied)

    def written(self) -> Future[float]:
        """Future of the last checkpoint: seconds that writing took. Raises OSError, e.g. if the disk is full."""
        return self._written

    def close(self) -> None:
        """Stop the thread after the last checkpoint."""
        if self._thread:
            self._thread.shutdown()

    def _write(self, parts: Sequence[Snapshot]) -> float:
        started = time.perf_counter()
        for part in parts:
            write_snapshot(part, self._group)
        return time.perf_counter() - started


class HostCopies:
    """Host memory for copies of tensors, kept for the next copy; page-locked for tensors from a GPU."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._taken: dict[tuple[int, torch.Size], Tensor] = {}

    def take(self, tree: Any, path: tuple[Any, ...]) -> Any:
        """Copy the tensors in a tree of dicts and lists. The copies are complete after `wait`.

        Args:
            path: name of the tree; its host memory is used again.
        """
        if isinstance(tree, dict):
            return {key: self.take(value, (*path, key)) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.take(value, (*path, index)) for index, value in enumerate(tree)]
        return self._tensor(tree.detach(), path) if isinstance(tree, Tensor) else tree

    def wait(self) -> None:
        """Wait until the copies are complete, so that the originals may change."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._taken.clear()

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        """Copy a tensor, once if it has several names (tied embeddings)."""
        local = local_tensor(tensor)
        memory = local.data_ptr(), local.shape
        if local.numel() and memory in self._taken:
            return self._taken[memory]
        copy = self._copies.get(path)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = self._copies[path] = tensor.to("cpu", copy=True)
            if local.is_cuda and local.ndim:  # not for step counters
                lock_pages(local_tensor(copy), owner=copy)
        else:
            local_tensor(copy).copy_(local, non_blocking=True)
        self._taken[memory] = copy
        return copy
