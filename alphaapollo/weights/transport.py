"""How the weights of a run travel, and the sender on a training rank.

shared_memory   engines on a CPU: safetensors under /dev/shm
ipc             engines on the training GPUs: CUDA IPC, by vLLM's own transfer
nccl            engines on GPUs of their own: NCCL, by vLLM's own transfer
adapter         engines that serve adapters (LoRA) on weights that they have: peft's files under /dev/shm
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from alphaapollo.types import WeightUpdate

Kind = Literal["shared_memory", "ipc", "nccl", "adapter"]


class WeightSender(Protocol):
    """The training ranks' end. A collective: every rank sends the same names in the same order."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """(name, whole tensor) pairs; the update on the rank that writes, None on the others."""
        ...

    def release(self) -> None:
        """Every engine has confirmed the last update."""
        ...


@dataclass(frozen=True)
class Transport:
    """What both ends of a run must agree on."""

    kind: Kind
    dtype: str  # the engine's: float32 | bfloat16
    folder: str  # of shared_memory, under /dev/shm
    num_engine_ranks: int  # GPUs or processes of all engines together


def transport_kind(device: str, colocate: bool, vllm_on_ray: bool, adapter: bool = False) -> Kind:
    """By where the engines run. vLLM's own transfers need a process an engine, beside those of the training ranks.
    `adapter`: the engines serve adapters."""
    if adapter:
        return "adapter"
    if device == "cpu" or not vllm_on_ray:
        return "shared_memory"
    return "ipc" if colocate else "nccl"


def make_sender(transport: Transport, rank: int, master_address: str, client: Any) -> WeightSender:
    """The sender of training rank `rank`.

    `master_address`: the host of rank 0, for nccl; `client`: the engines' side of vLLM's transfer, for the other two.
    """
    dtype: torch.dtype = getattr(torch, transport.dtype)
    if transport.kind == "adapter":
        from alphaapollo.weights.shared_adapter import SharedAdapterSender

        return SharedAdapterSender(transport.folder, dtype, is_writer=rank == 0)
    if transport.kind == "shared_memory":
        from alphaapollo.weights.shared_memory import SharedMemorySender

        return SharedMemorySender(transport.folder, dtype, is_writer=rank == 0)
    from alphaapollo.weights.vllm_transfer import VllmTransferSender

    return VllmTransferSender(client, dtype, rank, transport.kind, master_address, transport.num_engine_ranks)
