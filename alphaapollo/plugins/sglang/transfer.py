"""Trainer side of the GPU weight transfer to SGLang, without SGLang's package: each bucket is sent as one flat tensor
of bytes, over CUDA IPC (plugins/sglang/patches.py opens it) or a joint process group (SGLang's flattened_bucket)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.reductions import reduce_tensor

from alphaapollo.engines.weight_sync.buckets import Bucket
from alphaapollo.engines.weight_sync.transfer import TRANSFER_SECONDS, TransferSender
from alphaapollo.models.store import make_store
from alphaapollo.processes.network import reserve_port

GROUP = "alphaapollo_weights"
DEVICE_ARGUMENT = 6  # index of the device among the arguments of torch's rebuild_cuda_tensor


class SglangTransferSender(TransferSender):
    """Weight sender of a training rank to SGLang engines."""

    def _connect(self) -> Any:
        """Return the process group of rank 0 and the engines (nccl). CUDA IPC needs no connection."""
        if self.transport == "ipc" or self.rank > 0:
            return ()
        port, size = reserve_port(self.master_address), 1 + self.num_engine_ranks
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        info = {"master_address": self.master_address, "master_port": port, "rank_offset": 1, "world_size": size}
        info |= {"group_name": GROUP, "backend": backend}
        call = partial(self.client.init_weight_transfer_engine, info)
        join = partial(join_group, backend, self.master_address, port, size)
        return self._call_with_failure_detection(partial(run_beside_engines, call, join))

    def _send_bucket(self, bucket: Bucket) -> None:
        info, flat = describe_bucket(bucket), flatten_bucket(bucket)
        if self.transport == "ipc":
            handles = self._gather_handles(flat)
            if self.rank == 0:
                self.client.update_weights({**info, "handles": handles})
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # the engines have copied the tensor of every rank
        elif self.rank == 0:
            call = partial(self.client.update_weights, {**info, "group_name": GROUP})
            run_beside_engines(call, partial(torch.distributed.broadcast, flat, 0, group=self.connection))

    def _gather_handles(self, flat: torch.Tensor) -> dict[str, tuple[Any, ...]]:
        """Return the IPC handles of all ranks' tensors by the UUID of their GPU."""
        torch.cuda.current_stream().synchronize()
        _, arguments = reduce_tensor(flat)
        own = {str(torch.cuda.get_device_properties(flat.device).uuid): arguments}
        if not torch.distributed.is_initialized():
            return own
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, own)
        return {uuid: handle for rank in ranks for uuid, handle in rank.items()}


def run_beside_engines(call_engines: Callable[[], None], run: Callable[[], Any]) -> Any:
    """Return the result of `run`, a collective with the engines, in which they take part during `call_engines`."""
    calls = ThreadPoolExecutor(1)
    call = calls.submit(call_engines)
    calls.shutdown(wait=False)
    result = run()
    call.result()
    return result


def describe_bucket(bucket: Bucket) -> dict[str, object]:
    """Return names, dtypes and shapes of the tensors of a bucket, as SGLang expects them."""
    return {
        "names": list(bucket),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
        "shapes": [list(tensor.shape) for tensor in bucket.values()],
    }


def flatten_bucket(bucket: Bucket) -> torch.Tensor:
    """Return the bytes of a bucket's tensors, one after the other, as uint8 [bytes]."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bucket.values()])


def split_bucket(flat: torch.Tensor, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a flat bucket. info: see describe_bucket."""
    start = 0
    for name, dtype, shape in zip(info["names"], info["dtypes"], info["shapes"], strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        end = start + torch.Size(shape).numel() * kind.itemsize
        yield name, flat[start:end].view(kind).view(shape)
        start = end


def open_handle(handles: Mapping[str, tuple[Any, ...]]) -> torch.Tensor:
    """Return the tensor of another process on the current GPU. handles: see SglangTransferSender."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = torch.cuda.current_device()
    arguments = list(handles[str(torch.cuda.get_device_properties(device).uuid)])
    arguments[DEVICE_ARGUMENT] = device
    return rebuild_cuda_tensor(*arguments)


def join_group(backend: str, host: str, port: int, size: int) -> Any:
    """Join the process group GROUP as rank 0, beside the default group, like SGLang's init_custom_process_group."""
    c10d: Any = torch.distributed.distributed_c10d

    timeout = timedelta(seconds=TRANSFER_SECONDS)
    store = make_store(host, port, 0, size, timeout)
    store.set_timeout(timeout)
    prefixed = c10d.PrefixStore(GROUP, store)
    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), prefixed, group_name=GROUP, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
