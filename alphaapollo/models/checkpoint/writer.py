"""Background checkpoint writer. It copies the state into host memory, and a thread writes the copy.

    start: copy --> training continues
             `-- thread: write files --> `save_future` is done

The thread's collectives use a separate process group, so they do not mix with the collectives of training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from alphaapollo.models.checkpoint.snapshot import CheckpointSnapshot, write_snapshot
from alphaapollo.models.sharding import COLLECTIVE_TIMEOUT


class CheckpointWriter:
    """Writer of one rank's share of each checkpoint. All ranks must start the same checkpoints in the same order.

    `in_background`: write a copy while training continues. If false, `start` returns after the files are written.
    """

    def __init__(self, in_background: bool):
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        on_gpu = torch.cuda.is_available()  # copies are page-locked on a GPU machine
        self._stager = DefaultStager(
            StagingOptions(on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu)
        )
        self.save_future: Future[float] = Future()  # of the last checkpoint: writing time in seconds, or OSError
        self.save_future.set_result(0.0)

    def start(self, snapshots: Sequence[CheckpointSnapshot]) -> None:
        """Start to write a checkpoint of one or more models (a collective). The previous one must be complete."""
        assert self.save_future.done(), "the previous checkpoint must be complete"
        if self._thread:
            copies = [
                replace(one, tensors=cast("dict[str, object]", self._stager.stage(one.tensors))) for one in snapshots
            ]
            self.save_future = self._thread.submit(self._write_snapshots, copies)
        else:
            self.save_future = Future()
            self.save_future.set_result(self._write_snapshots(snapshots))

    def close(self) -> None:
        """Wait until the last checkpoint is written, then stop the thread."""
        if self._thread:
            self._thread.shutdown()
        self._stager.close()

    def _write_snapshots(self, snapshots: Sequence[CheckpointSnapshot]) -> float:
        started = time.perf_counter()
        for snapshot in snapshots:
            write_snapshot(snapshot, self._group)
        return time.perf_counter() - started
