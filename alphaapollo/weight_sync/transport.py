"""How the weights of a run travel, and the sender on a training rank.

shared_memory   engines on a CPU: safetensors under /dev/shm
ipc             engines on the training GPUs: CUDA IPC, by vLLM's own transfer
nccl            engines on GPUs of their own: NCCL, by vLLM's own transfer
adapter         engines that serve adapters (LoRA) on weights that they have: peft's files under /dev/shm

Between nodes they travel as the training ranks gather them: every rank has each whole tensor for a moment. So on each
node one rank writes for the engines there, and over IPC each GPU's rank gives to the engine on it. NCCL alone sends to
other nodes by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from alphaapollo.types import WeightUpdate

Kind = Literal["shared_memory", "ipc", "nccl", "adapter"]


class WeightSender(Protocol):
    """The training ranks' end. A collective: every rank sends the same names in the same order."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """(name, whole tensor) pairs; the update on each rank that writes it, None on the others."""
        ...

    def release(self) -> None:
        """Every engine has confirmed the last update."""
        ...


@dataclass(frozen=True)
class Transport:
    """What both ends of a run must agree on."""

    kind: Kind
    dtype: str  # the engine's: float32 | bfloat16
    shared_memory: str  # the run's folder under /dev/shm, of the same name on every node
    num_engine_ranks: int  # GPUs or processes of all engines together


def transport_kind(device: str, colocate: bool, vllm_on_ray: bool, adapter: bool = False) -> Kind:
    """By where the engines run. vLLM's own transfers need a process an engine, beside those of the training ranks.
    `adapter`: the engines serve adapters."""
    if adapter:
        return "adapter"
    if device == "cpu" or not vllm_on_ray:
        return "shared_memory"
    return "ipc" if colocate else "nccl"


def weights_folder(shared_memory: str, node: str) -> str:
    """Where weights lie for the engines of a node (Ray's id of it): several nodes may be one machine."""
    return f"{shared_memory}/weights/{node}"


def feeders(rank_nodes: Sequence[str], engine_nodes: Collection[str]) -> list[str | None]:
    """Of each rank the node whose engines it writes for: its own, if engines run there and it is the first there."""
    return [
        node if node in engine_nodes and node not in rank_nodes[:rank] else None for rank, node in enumerate(rank_nodes)
    ]


def make_sender(transport: Transport, rank: int, feeds: str | None, master_address: str, client: Any) -> WeightSender:
    """The sender of training rank `rank`.

    `feeds`: the node whose engines it writes for, None: another does, for shared_memory and adapter; `master_address`:
    the host of rank 0, for nccl; `client`: the engines' side of vLLM's transfer, for nccl and ipc.
    """
    dtype: torch.dtype = getattr(torch, transport.dtype)
    folder = weights_folder(transport.shared_memory, feeds or "")
    if transport.kind == "adapter":
        from alphaapollo.weight_sync.shared_adapter import SharedAdapterSender

        return SharedAdapterSender(folder, dtype, is_writer=feeds is not None)
    if transport.kind == "shared_memory":
        from alphaapollo.weight_sync.shared_memory import SharedMemorySender

        return SharedMemorySender(folder, dtype, is_writer=feeds is not None)
    from alphaapollo.weight_sync.vllm_transfer import VllmTransferSender

    return VllmTransferSender(client, dtype, rank, transport.kind, master_address, transport.num_engine_ranks)
