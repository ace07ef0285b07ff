"""The trainer's side of the GPU weight transfer: vLLM's own engines for CUDA IPC (shared GPUs) and NCCL (separate).

    start_weight_update -> for each batch of tensors: send_weights -> finish_weight_update

While a batch is sent the next is gathered (buckets.ahead).

The tensors come once and are gathered on the way, so a whole model's sizes are not known beforehand and its copy would
not fit: each batch is a round of vLLM's engine of its own, within one update of the inference side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.utils.network import free_port
from alphaapollo.weight_sync.buckets import Batch, ahead, batches, num_bytes
from alphaapollo.weight_sync.digest import MODULUS, format_digest, tensors_digest

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightSource

TRANSFER_SECONDS = 300.0  # for one batch over NCCL, and for the first meeting
T = TypeVar("T")
UpdateInfo = dict[str, Any] | list[dict[str, Any]]


class WeightSyncClient(Protocol):
    """vLLM's VLLMWeightSyncClient: each method runs on every inference engine and waits for all of them."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: UpdateInfo) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class VllmTransferSender:
    """Sends through vLLM's weight transfer. Created on every training rank; rank 0 drives the inference side.

    `transport` is ipc where engines share the training GPUs, nccl where they have their own. For nccl:
    `master_address` is where rank 0 can be reached, `num_engine_ranks` the GPUs of all engines together.
    """

    def __init__(
        self,
        client: WeightSyncClient,
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
        self._within = WithinUpdate(client)
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Send (name, whole tensor) pairs on the GPU, each parameter once, named as in a Hugging Face checkpoint.

        A collective of all training ranks, which must iterate the same names; rank 0 returns the update.
        """
        if self._engine is None:
            self._engine = self._connect()
        digest = 0
        if self._rank == 0:
            self._client.start_weight_update()
        for batch in ahead(batches(tensors, self._dtype)):
            if self._rank == 0:
                digest += tensors_digest(batch.values())
            self._send_batch(self._engine, batch)
            del batch  # before the next but one is gathered
        if self._rank > 0:
            return None
        self._client.finish_weight_update()
        return WeightUpdate(version, format_digest(digest % MODULUS))

    def release(self) -> None:
        """The engines have let go of the last shared buffer: it is memory again."""
        if self._transport == "ipc":
            torch.cuda.ipc_collect()

    def _send_batch(self, engine: Any, batch: Batch) -> None:
        engine.source = batch_source(batch)
        if self._transport == "ipc":
            engine.packed_buffer_size_bytes = num_bytes(batch)
        self._watch(engine.send_weights)
        engine.source = batch_source({})  # which vLLM keeps until the next publish

    def _watch(self, call: Callable[[], T]) -> T:
        """Over NCCL rank 0 blocks in the broadcast until every engine has joined it, so one that has failed would keep
        it for ever: call in a thread, and end with the engine's own error, or at a deadline. Nothing can be sent after
        that; the run ends."""
        if self._transport == "ipc" or self._rank > 0:
            return call()
        device = torch.accelerator.current_device_index()

        def run() -> T:
            torch.accelerator.set_device_index(device)
            return call()

        thread = ThreadPoolExecutor(1)
        sending = thread.submit(run)
        thread.shutdown(wait=False)
        ends: list[Future[Any]] = [sending, self._within.failed]
        wait(ends, TRANSFER_SECONDS, return_when=FIRST_COMPLETED)
        if self._within.failed.done():
            self._within.failed.result()
        if not sending.done():
            raise TimeoutError(
                f"an engine did not take part in a transfer of weights within {TRANSFER_SECONDS:.0f} s. Its log in the "
                "run's logs/ says why, or NCCL cannot reach it (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME)."
            )
        return sending.result()

    def _connect(self) -> TrainerWeightTransferEngine[Any]:
        """The handshake: for ipc an exchange of settings, for nccl a process group of rank 0 and all engines' GPUs."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info: IPCTrainerInitInfo | NCCLTrainerInitInfo
        if self._transport == "ipc":
            info = IPCTrainerInitInfo(packed=True, rank=self._rank)
        else:
            info = NCCLTrainerInitInfo(
                master_address=self._master_address,
                master_port=free_port(),
                world_size=1 + self._num_engine_ranks,
                rank=self._rank,
            )
        join = WeightTransferTrainerFactory.trainer_init
        return self._watch(lambda: join(info, client=self._within, source=batch_source({})))


class WithinUpdate:
    """The client for one batch: vLLM's engine opens and closes an update in each round, we do so once for all.

    `failed` gets the engines' error at once: who waits for their part in a broadcast would never hear of it."""

    def __init__(self, client: WeightSyncClient):
        self._client = client
        self.failed: Future[None] = Future()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._noting_failure(lambda: self._client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: UpdateInfo) -> None:
        self._noting_failure(lambda: self._client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    def _noting_failure(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.failed.set_exception(error)
            raise


def batch_source(batch: Batch) -> WeightSource:
    """One batch as what vLLM's trainer engines read."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class BatchSource(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from batch.items()

    return BatchSource()
