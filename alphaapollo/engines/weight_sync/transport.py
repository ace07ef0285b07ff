"""How weights are sent from the training ranks to the engines. Imports no torch, for the process of an engine.

shared_memory   engines on CPUs, and engines on GPUs that cannot load buckets: safetensors under /dev/shm
ipc             engines on the training GPUs: CUDA IPC
nccl            engines on separate GPUs: NCCL
adapter         engines that serve LoRA adapters on their own base weights: peft files under /dev/shm

All training ranks gather each full tensor (FSDP), so every node has all weights. With shared_memory and adapter, one
rank per node then writes files for the engines on its node. Engines on nodes without ranks copy the files of rank 0, or
only what changed in them (changes.py), through Ray. With ipc, each rank sends to the engine on its own GPU. With nccl,
rank 0 sends to all engines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

TransportKind = Literal["shared_memory", "ipc", "nccl", "adapter"]
UpdateInfo = dict[str, object] | list[dict[str, object]]
"""Description of a bucket of tensors, for the engines (ipc, nccl)."""
TransferMethod = Literal["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]


@dataclass(frozen=True)
class WeightUpdate:
    """Version and checksum of the weights that the trainer sends to the engines.

    folder: name of the folder with the tensors in the shared memory of each node; empty if the engines have already
    received the tensors (ipc, nccl).
    """

    version: int
    digest: str  # checksum of the sent tensors (weight_sync/digest.py)
    folder: str = ""


@dataclass(frozen=True)
class WeightReceipt:
    """Version and checksum of the weights that an engine has after a weight sync.

    If they differ from the trainer's WeightUpdate, the run stops.
    """

    version: int
    digest: str
    copied_bytes: int = 0  # bytes copied from rank 0 to the engine's node


class CallEngines(Protocol):
    """Function that calls a method of the weight transfer (engines/protocol.py) on all engines, and waits for them."""

    def __call__(self, method: TransferMethod, *arguments: object) -> None: ...


class WeightSender(Protocol):
    """Interface of the object that sends a training rank's weights to the engines."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Send (name, full tensor) pairs to the engines. A collective: all ranks send the same names in the same order.
        Returns the weights' version and digest on ranks that write or send the tensors, else None."""

    def release_sent_weights(self) -> None:
        """Free the files or buffers of the last weight sync. Call after all engines have confirmed the weights."""


@dataclass(frozen=True)
class Transport:
    """Settings of the weight transfer from the trainer to the engines."""

    kind: TransportKind
    dtype: str  # dtype of the engine's weights: float32 | bfloat16
    shared_folder: str  # folder of the run under /dev/shm, with the same path on every node
    num_engine_ranks: int  # total number of GPUs (or CPU processes) of all engines
    sender: str = ""  # weight_sender of the engine's class, for ipc and nccl


def choose_transport(
    device: str, is_colocated: bool, receives_buckets: bool, serves_adapters: bool = False
) -> TransportKind:
    """Choose how the engines receive weights. receives_buckets: whether the engines have a weight sender and workers in
    other processes (ipc and nccl need both). serves_adapters: whether they serve LoRA adapters (rollout.lora=adapter).
    """
    if serves_adapters:
        return "adapter"
    if device == "cpu" or not receives_buckets:
        return "shared_memory"
    return "ipc" if is_colocated else "nccl"


def get_weights_folder(shared_folder: str, node_id: str) -> str:
    """Return the shared-memory folder with the weights for a node's engines. node_id: Ray's id of the node."""
    return f"{shared_folder}/weights/{node_id}"


def assign_weight_writers(rank_nodes: Sequence[str], engine_nodes: Collection[str]) -> list[str | None]:
    """Choose the first training rank of each node with engines to write the weights for these engines, and rank 0 if
    there are engines on other nodes. Returns for each rank the node for which it writes, or None."""
    file_nodes = {*engine_nodes, *rank_nodes[:1]} if set(engine_nodes) - set(rank_nodes) else engine_nodes
    return [
        node if node in file_nodes and node not in rank_nodes[:rank] else None for rank, node in enumerate(rank_nodes)
    ]
