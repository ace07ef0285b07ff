"""Trainer side of the GPU weight transfer, over CUDA IPC (shared GPUs) or NCCL (separate GPUs): what the senders of all
engines share, e.g. vllm_transfer.py.

    start_weight_update -> for each bucket of tensors: update_weights -> finish_weight_update

A full copy of the weights would not fit into memory, so a bucket is sent at a time, but the engines see a single weight
update."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from alphaapollo.engines.weight_sync.buckets import Bucket, make_buckets, prefetch_buckets
from alphaapollo.engines.weight_sync.digest import MODULUS, compute_joint_digest, format_digest
from alphaapollo.engines.weight_sync.transport import CallEngines, TransferMethod, UpdateInfo, WeightUpdate

EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)  # in settings of torch's allocator
TRANSFER_SECONDS = 300.0  # timeout of the handshake and of each bucket over NCCL
T = TypeVar("T")


@dataclass
class TransferSender:
    """Weight sender of a training rank. Rank 0 also makes the calls to the engines."""

    call_engines: CallEngines
    dtype: torch.dtype
    rank: int
    transport: Literal["ipc", "nccl"]  # ipc if the engines share the training GPUs, nccl if they have separate GPUs
    master_address: str = ""  # address of rank 0 (nccl)
    num_engine_ranks: int = 0  # number of GPUs of all engines (nccl)
    connection: Any = field(default=None, init=False)  # to the engines; None: not connected

    def __post_init__(self) -> None:
        self.client = SingleUpdateClient(self.call_engines)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Send (Hugging Face name, full tensor on the GPU) pairs to the engines; see WeightSender."""
        if self.connection is None:
            self.connection = self._connect()
        digest = 0
        if self.rank == 0:
            self.call_engines("start_weight_update")
        with without_expandable_segments():
            for bucket in prefetch_buckets(make_buckets(tensors, self.dtype)):
                if self.rank == 0:
                    digest += compute_joint_digest(bucket.values())
                self._call_with_failure_detection(partial(self._send_bucket, bucket))
                del bucket  # free its memory before another gather starts
        if self.rank > 0:
            return None
        self.call_engines("finish_weight_update")
        return WeightUpdate(version, format_digest(digest % MODULUS))

    def release_sent_weights(self) -> None:
        """Free the GPU buffers that the engines have mapped over CUDA IPC and released."""
        if self.transport == "ipc":
            torch.cuda.ipc_collect()

    def _connect(self) -> Any:
        """Exchange settings with the engines (ipc), or create a joint process group (nccl). Returns the connection."""
        raise NotImplementedError

    def _send_bucket(self, bucket: Bucket) -> None:
        """Send a bucket of tensors to all engines, and call their update_weights."""
        raise NotImplementedError

    def _call_with_failure_detection(self, call: Callable[[], T]) -> T:
        """Return the result of `call`. Over NCCL, `call` on rank 0 never returns if an engine fails. Rank 0 then raises
        the engine's error instead, or TimeoutError after TRANSFER_SECONDS."""
        if self.transport == "ipc" or self.rank > 0:
            return call()
        device = torch.accelerator.current_device_index()
        thread = ThreadPoolExecutor(1, initializer=torch.accelerator.set_device_index, initargs=(device,))
        sending = thread.submit(call)
        thread.shutdown(wait=False)
        outcomes: list[Future[Any]] = [sending, self.client.failed]
        wait(outcomes, TRANSFER_SECONDS, return_when=FIRST_COMPLETED)
        if self.client.failed.done():
            self.client.failed.result()  # raises the engine's error
        if not sending.done():
            raise TimeoutError(
                f"an engine did not join the weight transfer within {TRANSFER_SECONDS:.0f} s. See its log in the run's "
                "logs/, and check that NCCL can reach it (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME)."
            )
        return sending.result()


def read_allocator_settings() -> str:
    """Return the configuration of torch's CUDA allocator in the environment, or an empty text."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Context manager in which torch allocates no expandable segments, which other processes can map over CUDA IPC only
    with a privilege that containers lack. torch resets all settings that a new configuration does not name."""
    configured = read_allocator_settings()
    changed = EXPANDABLE.sub(r"\1False", configured)
    if changed == configured:
        yield
        return
    torch.cuda.memory._set_allocator_settings(changed)
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(configured)


@dataclass
class SingleUpdateClient:
    """Calls to the engines, with the interface of vLLM's VLLMWeightSyncClient. vLLM starts and finishes an update for
    each bucket. In this class these two calls do nothing, so that all buckets belong to one update."""

    call_engines: CallEngines
    failed: Future[None] = field(default_factory=Future)  # the first error of an engine

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self._call_and_record_error("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: UpdateInfo) -> None:
        self._call_and_record_error("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    def _call_and_record_error(self, method: TransferMethod, argument: object) -> None:
        try:
            self.call_engines(method, argument)
        except Exception as error:
            self.failed.set_exception(error)
            raise
