"""Trainer side of the GPU weight transfer: vLLM's transfer engines for CUDA IPC (shared GPUs) and NCCL (separate GPUs).

    start_weight_update -> for each bucket of tensors: send_weights -> finish_weight_update

While a bucket is sent, the next one is gathered (buckets.prefetch_buckets). A full copy of the weights would not fit
into memory, so each bucket is a separate `send_weights` round of vLLM's engine within one update of the inference side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.utils.network import find_free_port
from alphaapollo.weight_sync.buckets import Bucket, count_bytes, make_buckets, prefetch_buckets
from alphaapollo.weight_sync.digest import MODULUS, compute_joint_digest, format_digest

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, VLLMWeightSyncClient, WeightSource

TRANSFER_SECONDS = 300.0  # timeout of the handshake and of each bucket over NCCL
T = TypeVar("T")
UpdateInfo = dict[str, Any] | list[dict[str, Any]]


class VllmTransferSender:
    """Weight sender on every training rank that uses vLLM's weight transfer. Rank 0 drives the inference side.

    Args:
        client: calls each method on all inference engines and waits for them.
        transport: ipc if the engines share the training GPUs, nccl if they have separate GPUs.
        master_address: address of rank 0 (nccl).
        num_engine_ranks: number of GPUs of all engines (nccl).
    """

    def __init__(
        self,
        client: VLLMWeightSyncClient,
        dtype: torch.dtype,
        rank: int,
        transport: Literal["ipc", "nccl"],
        master_address: str = "",
        num_engine_ranks: int = 0,
    ):
        self._client = client
        self._dtype = dtype
        self._rank = rank
        self._transport = transport
        self._master_address = master_address
        self._num_engine_ranks = num_engine_ranks
        self._update_client = SingleUpdateClient(client)
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Send (name, full tensor) pairs on the GPU: each parameter once, with its name in a Hugging Face checkpoint. A
        collective: all training ranks must iterate the same names. Returns the update on rank 0 and None elsewhere."""
        if self._engine is None:
            self._engine = self._connect()
        digest = 0
        if self._rank == 0:
            self._client.start_weight_update()
        for bucket in prefetch_buckets(make_buckets(tensors, self._dtype)):
            if self._rank == 0:
                digest += compute_joint_digest(bucket.values())
            self._send_bucket(self._engine, bucket)
            del bucket  # free its memory before another gather starts
        if self._rank > 0:
            return None
        self._client.finish_weight_update()
        return WeightUpdate(version, format_digest(digest % MODULUS))

    def release(self) -> None:
        """Reclaim shared buffers that the engines have released."""
        if self._transport == "ipc":
            torch.cuda.ipc_collect()

    def _send_bucket(self, engine: Any, bucket: Bucket) -> None:
        engine.source = make_weight_source(bucket)
        if self._transport == "ipc":
            engine.packed_buffer_size_bytes = count_bytes(bucket)
        self._call_with_failure_detection(engine.send_weights)
        engine.source = make_weight_source({})  # vLLM keeps the source until the next publish

    def _call_with_failure_detection(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, or raise an engine's error or TimeoutError. Over NCCL, rank 0 blocks in the
        broadcast until every engine joins, so a failed engine would block it forever. Rank 0 therefore runs `call` in a
        thread. After an error nothing more can be sent, and the run ends."""
        if self._transport == "ipc" or self._rank > 0:
            return call()
        device = torch.accelerator.current_device_index()

        def run() -> T:
            torch.accelerator.set_device_index(device)
            return call()

        thread = ThreadPoolExecutor(1)
        sending = thread.submit(run)
        thread.shutdown(wait=False)
        ends: list[Future[Any]] = [sending, self._update_client.failed]
        wait(ends, TRANSFER_SECONDS, return_when=FIRST_COMPLETED)
        if self._update_client.failed.done():
            self._update_client.failed.result()
        if not sending.done():
            raise TimeoutError(
                f"an engine did not join the weight transfer within {TRANSFER_SECONDS:.0f} s. See its log in the run's "
                "logs/, and check that NCCL can reach it (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME)."
            )
        return sending.result()

    def _connect(self) -> TrainerWeightTransferEngine[Any]:
        """Connect to the engines: exchange settings (ipc), or create a joint process group (nccl)."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info: IPCTrainerInitInfo | NCCLTrainerInitInfo
        if self._transport == "ipc":
            info = IPCTrainerInitInfo(packed=True, rank=self._rank)
        else:
            info = NCCLTrainerInitInfo(
                master_address=self._master_address,
                master_port=find_free_port(),
                world_size=1 + self._num_engine_ranks,
                rank=self._rank,
            )
        join = WeightTransferTrainerFactory.trainer_init
        return self._call_with_failure_detection(
            lambda: join(info, client=self._update_client, source=make_weight_source({}))
        )


class SingleUpdateClient:
    """Weight-sync client that combines the rounds of all buckets into one update. vLLM's engine would start and finish
    an update in each round, so these calls do nothing here. `failed` receives an engine error at once, because a caller
    that is blocked in a broadcast would never see it."""

    def __init__(self, client: VLLMWeightSyncClient):
        self._client = client
        self.failed: Future[None] = Future()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._record_failure(lambda: self._client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: UpdateInfo) -> None:
        self._record_failure(lambda: self._client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    def _record_failure(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.failed.set_exception(error)
            raise


def make_weight_source(bucket: Bucket) -> WeightSource:
    """Wrap one bucket as the WeightSource that vLLM's trainer engines read."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class BatchSource(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from bucket.items()

    return BatchSource()
