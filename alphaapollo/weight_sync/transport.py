"""Choice of the weight transport of a run, and construction of the sender of a training rank.

shared_memory   CPU engines: safetensors under /dev/shm
ipc             engines on the training GPUs: CUDA IPC through vLLM's weight transfer
nccl            engines on separate GPUs: NCCL through vLLM's weight transfer
adapter         engines that serve LoRA adapters on their own base weights: peft files under /dev/shm

Every training rank gathers each full tensor, and this gather transfers the weights between nodes. With shared memory
and adapters, one rank per node then writes files for the engines on its node. With IPC, each rank sends to the engine
on its own GPU. Only NCCL sends tensors to engines on other nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from alphaapollo.types import WeightUpdate

TransportKind = Literal["shared_memory", "ipc", "nccl", "adapter"]


class WeightSender(Protocol):
    """Interface of the weight sender on a training rank. `send` is a collective: every rank sends the same names in the
    same order."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Send (name, full tensor) pairs. Returns the update on ranks that write it, and None on all other ranks."""
        ...

    def release(self) -> None:
        """Free the resources of the last update. Call it after every engine has confirmed the update."""
        ...


@dataclass(frozen=True)
class Transport:
    """Settings of the weight transport that trainer and engines share."""

    kind: TransportKind
    dtype: str  # dtype of the engine's weights: float32 | bfloat16
    shared_memory: str  # folder of the run under /dev/shm, with the same path on every node
    num_engine_ranks: int  # total number of GPUs (or CPU processes) of all engines


def choose_transport(device: str, colocate: bool, vllm_on_ray: bool, adapter: bool = False) -> TransportKind:
    """Return the kind of transport for engines on this device. `adapter`: whether the engines serve LoRA adapters.
    vLLM's own transfers (ipc, nccl) need engines in separate processes."""
    if adapter:
        return "adapter"
    if device == "cpu" or not vllm_on_ray:
        return "shared_memory"
    return "ipc" if colocate else "nccl"


def weights_folder(shared_memory: str, node: str) -> str:
    """Return the folder with weights for the engines of a node.

    node: Ray node id, because several nodes may share a machine.
    """
    return f"{shared_memory}/weights/{node}"


def assign_writers(rank_nodes: Sequence[str], engine_nodes: Collection[str]) -> list[str | None]:
    """Return for each rank the node for whose engines it writes weights, or None. The first rank of each node writes
    for that node if engines run on it."""
    return [
        node if node in engine_nodes and node not in rank_nodes[:rank] else None for rank, node in enumerate(rank_nodes)
    ]


def make_sender(
    transport: Transport, rank: int, engine_node: str | None, master_address: str, client: Any
) -> WeightSender:
    """Build the sender of training rank `rank`.

    engine_node: node for whose engines this rank writes weights; None: another rank writes (shared_memory, adapter).
    master_address: host of rank 0 (nccl). client: engine side of vLLM's transfer (nccl, ipc).
    """
    dtype: torch.dtype = getattr(torch, transport.dtype)
    folder = weights_folder(transport.shared_memory, engine_node or "")
    if transport.kind == "adapter" or transport.kind == "shared_memory":
        from alphaapollo.weight_sync.shared_memory import SharedAdapterSender, SharedMemorySender

        sender = SharedAdapterSender if transport.kind == "adapter" else SharedMemorySender
        return sender(folder, dtype, is_writer=engine_node is not None)
    from alphaapollo.weight_sync.vllm_transfer import VllmTransferSender

    return VllmTransferSender(client, dtype, rank, transport.kind, master_address, transport.num_engine_ranks)
