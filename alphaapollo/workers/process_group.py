"""Placement of a training rank, and the process groups that it belongs to."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from alphaapollo.models.sharding import join_process_group, make_mesh
from alphaapollo.models.ulysses import SequenceGroup, create_sequence_groups

NO_RENDEZVOUS = ""  # init_method of a single rank


@dataclass(frozen=True)
class RankPlacement:
    """Placement of one training rank."""

    rank: int
    world_size: int
    init_method: str  # see models.sharding.join_process_group
    device: str  # "cpu" or "cuda"
    threads: int  # torch threads
    sequence_parallel: int = 1  # consecutive ranks that share every sequence, a divisor of the world size
    engine_node: str | None = None  # this rank writes weights into shared memory for the engines of that node


def join_ranks(
    placement: RankPlacement, fsdp_size: int = -1
) -> tuple[DeviceMesh, SequenceGroup | None, dist.ProcessGroup | None]:
    """Initialize this process as a rank (a collective). fsdp_size: ranks that share one copy of the model; -1 = all.

    Returns the mesh of the model, the ranks that compute the same rows (None without sequence parallelism), and the
    ranks that together have every row once (None: all).
    """
    torch.set_num_threads(placement.threads)  # Ray starts its processes with one
    if placement.device == "cuda":
        torch.cuda.set_device(placement.rank % torch.cuda.device_count())  # a Ray actor sees its own GPU only
    join_process_group(placement.device, placement.rank, placement.world_size, placement.init_method)
    mesh = make_mesh(placement.device, fsdp_size)
    return mesh, *create_sequence_groups(placement.device, placement.sequence_parallel)


def leave_ranks() -> None:
    """Destroy the process group.

    A gloo thread may still release the last tensors, and the process would abort if that thread needed the interpreter
    during its exit. The garbage collection gives it time.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
