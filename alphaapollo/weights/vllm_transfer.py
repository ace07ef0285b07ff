"""The trainer's side of the GPU weight transfer: vLLM's own engines for CUDA IPC (shared GPUs) and NCCL (separate).

    start_weight_update -> for each batch of tensors: send_weights -> finish_weight_update

The tensors come once and are gathered on the way, so a whole model's sizes are not known beforehand and its copy would
not fit: each batch is a round of vLLM's engine of its own, within one update of the inference side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from alphaapollo.network import free_port
from alphaapollo.types import WeightUpdate
from alphaapollo.weights.buckets import Batch, batches, num_bytes
from alphaapollo.weights.digest import MODULUS, format_digest, tensors_digest

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightSource

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
        for batch in batches(tensors, self._dtype):
            if self._rank == 0:
                digest += tensors_digest(batch.values())
            self._send_batch(self._engine, batch)
        if self._rank > 0:
            return None
        self._client.finish_weight_update()
        return WeightUpdate(version, format_digest(digest % MODULUS))

    def release(self) -> None:
        """Nothing stays behind a transfer."""

    def _send_batch(self, engine: Any, batch: Batch) -> None:
        engine.source = batch_source(batch)
        if self._transport == "ipc":
            engine.packed_buffer_size_bytes = num_bytes(batch)
        engine.send_weights()

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
        client = WithinUpdate(self._client)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=batch_source({}))


class WithinUpdate:
    """The client for one batch: vLLM's engine opens and closes an update in each round, we do so once for all."""

    def __init__(self, client: WeightSyncClient):
        self._client = client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: UpdateInfo) -> None:
        self._client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def batch_source(batch: Batch) -> WeightSource:
    """One batch as what vLLM's trainer engines read."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class BatchSource(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from batch.items()

    return BatchSource()
