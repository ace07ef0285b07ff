"""Checkpoints written behind the training: what is saved is copied into host memory, and a thread writes the copy.

    start: copy --> the rank goes on
             `-- thread: write the files --> written

The thread's collectives have a process group of their own, so they never cross those of the training.
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
from alphaapollo.models.sharding import PATIENCE, local_tensor
from alphaapollo.models.training.offload import lock_pages


class CheckpointWriter:
    """Writes the checkpoints of one rank, one at a time. Every rank makes one, and starts the same ones.

    Args:
        behind: write a copy while the rank goes on; else `start` returns when all is written, and nothing is copied.
    """

    def __init__(self, behind: bool):
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if behind else None
        self._copies = HostCopies()
        self._written: Future[float] = Future()
        self._written.set_result(0.0)

    def start(self, parts: Sequence[Snapshot]) -> None:
        """Write the parts of a checkpoint (a collective of all ranks); the one before must have been written."""
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
        """Of the last one started: the seconds that the writing took, or the OSError that names the folder."""
        return self._written

    def close(self) -> None:
        """After the last one is written."""
        if self._thread:
            self._thread.shutdown()

    def _write(self, parts: Sequence[Snapshot]) -> float:
        started = time.perf_counter()
        for part in parts:
            write_snapshot(part, self._group)
        return time.perf_counter() - started


class HostCopies:
    """Host memory that tensors are copied into. It is kept for the next time, page-locked for what comes from a GPU."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._taken: dict[tuple[int, torch.Size], Tensor] = {}

    def take(self, tree: Any, path: tuple[Any, ...]) -> Any:
        """A tree of dicts and lists, the tensors in it copied; complete after `wait`.

        path: names the tree: the memory of the one that had this name before is used again.
        """
        if isinstance(tree, dict):
            return {key: self.take(value, (*path, key)) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.take(value, (*path, index)) for index, value in enumerate(tree)]
        return self._tensor(tree.detach(), path) if isinstance(tree, Tensor) else tree

    def wait(self) -> None:
        """The copies are complete, and the originals may change."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._taken.clear()

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        """A tensor that has several names (tied embeddings) is copied once."""
        local = local_tensor(tensor)
        place = local.data_ptr(), local.shape
        if local.numel() and place in self._taken:
            return self._taken[place]
        copy = self._copies.get(path)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = self._copies[path] = tensor.to("cpu", copy=True)
            if local.is_cuda and local.ndim:  # a step counter is not worth it
                lock_pages(local_tensor(copy), owner=copy)
        else:
            local_tensor(copy).copy_(local, non_blocking=True)
        self._taken[place] = copy
        return copy
