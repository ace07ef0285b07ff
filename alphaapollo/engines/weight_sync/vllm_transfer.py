"""Trainer side of the GPU weight transfer to vLLM, through vLLM's weight transfer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from alphaapollo.engines.weight_sync.buckets import Bucket, count_bytes
from alphaapollo.engines.weight_sync.transfer import TransferSender
from alphaapollo.engines.weight_sync.vllm_import import import_vllm
from alphaapollo.processes.network import find_free_port

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightSource


class VllmTransferSender(TransferSender):
    """Weight sender of a training rank that uses vLLM's weight transfer."""

    def _send_bucket(self, bucket: Bucket) -> None:
        self.connection.source = make_weight_source(bucket)
        if self.transport == "ipc":
            self.connection.packed_buffer_size_bytes = count_bytes(bucket)
        self.connection.send_weights()
        self.connection.source = make_weight_source({})  # vLLM keeps its source: free the bucket's memory

    def _connect(self) -> TrainerWeightTransferEngine[Any]:
        import_vllm()
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info: IPCTrainerInitInfo | NCCLTrainerInitInfo
        if self.transport == "ipc":
            info = IPCTrainerInitInfo(packed=True, rank=self.rank)
        else:
            info = NCCLTrainerInitInfo(
                master_address=self.master_address,
                master_port=find_free_port(),
                world_size=1 + self.num_engine_ranks,
                rank=self.rank,
            )
        join = WeightTransferTrainerFactory.trainer_init
        return self._call_with_failure_detection(lambda: join(info, client=self.client, source=make_weight_source({})))


def make_weight_source(bucket: Bucket) -> WeightSource:
    """Wrap a bucket of tensors as a WeightSource, from which vLLM reads the tensors to send."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    def list_metadata(source: WeightSource) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket.items()]

    def iterate(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        yield from bucket.items()

    methods: dict[str, object] = {"metadata": list_metadata, "__iter__": iterate}
    if hasattr(WeightSource, "iter_full"):  # vLLM 0.33
        methods = {"metadata": cached_property(list_metadata), "iter_full": iterate}
    source: WeightSource = type("BucketSource", (WeightSource,), methods)()
    return source
