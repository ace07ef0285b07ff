"""Choose the weight transport of a run and build the sender of a training rank.

shared_memory   CPU engines: safetensors under /dev/shm
ipc             engines on the training GPUs: CUDA IPC through vLLM's weight transfer
nccl            engines on separate GPUs: NCCL through vLLM's weight transfer
adapter         engines that serve LoRA adapters on their own base weights: peft files under /dev/shm

Every training rank gathers each full tensor, so weights cross nodes as part of that gather: on each node one rank
writes for the engines there, and with IPC each GPU's rank sends to the engine on the same GPU. Only NCCL sends to other
nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from alphaapollo.types import WeightUpdate

TransportKind = Literal["shared_memory", "ipc", "nccl", "adapter"]


class WeightSender(Protocol):
    """Sender on a training rank. A collective: every rank sends the same names in the same order."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Send (name, full tensor) pairs. Returns the update on ranks that write it, None on the others."""
        ...

    def release(self) -> None:
        """Free the resources of the last update, which every engine has confirmed."""
        ...


@dataclass(frozen=True)
class Transport:
    """Settings that trainer and engines must share."""

    kind: TransportKind
    dtype: str  # the engine's: float32 | bfloat16
    shared_memory: str  # the run's folder under /dev/shm, same name on every node
    num_engine_ranks: int  # GPUs or processes of all engines together


def choose_transport(device: str, colocate: bool, vllm_on_ray: bool, adapter: bool = False) -> TransportKind:
    """Choose the transport from where the engines run. vLLM's transfers need one process per engine, besides the
    training ranks. `adapter`: the engines serve LoRA adapters."""
    if adapter:
        return "adapter"
    if device == "cpu" or not vllm_on_ray:
        return "shared_memory"
    return "ipc" if colocate else "nccl"


def weights_folder(shared_memory: str, node: str) -> str:
    """Folder of the weights for the engines of a node (by Ray node id: several nodes may share a machine)."""
    return f"{shared_memory}/weights/{node}"


def assign_writers(rank_nodes: Sequence[str], engine_nodes: Collection[str]) -> list[str | None]:
    """For each rank the node it writes weights for (its own, if engines run there and it is the node's first rank), or
    None."""
    return [
        node if node in engine_nodes and node not in rank_nodes[:rank] else None for rank, node in enumerate(rank_nodes)
    ]


def make_sender(
    transport: Transport, rank: int, engine_node: str | None, master_address: str, client: Any
) -> WeightSender:
    """Build the sender of training rank `rank`.

    engine_node: node it writes for, None if another rank does (shared_memory, adapter). master_address: host of rank 0
    (nccl). client: engine side of vLLM's transfer (nccl, ipc).
    """
    dtype: torch.dtype = getattr(torch, transport.dtype)
    folder = weights_folder(transport.shared_memory, engine_node or "")
    if transport.kind == "adapter" or transport.kind == "shared_memory":
        from alphaapollo.weight_sync.shared_memory import SharedAdapterSender, SharedMemorySender

        sender = SharedAdapterSender if transport.kind == "adapter" else SharedMemorySender
        return sender(folder, dtype, is_writer=engine_node is not None)
    from alphaapollo.weight_sync.vllm_transfer import VllmTransferSender

    return VllmTransferSender(client, dtype, rank, transport.kind, master_address, transport.num_engine_ranks)
