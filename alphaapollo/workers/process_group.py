"""Placement of a training rank and its process groups."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from alphaapollo.models.sharding import join_process_group, make_mesh
from alphaapollo.models.ulysses import SequenceGroup, create_sequence_groups

NO_RENDEZVOUS = ""  # init_method if there is a single rank


@dataclass(frozen=True)
class RankPlacement:
    """Placement of one training rank."""

    rank: int
    world_size: int
    init_method: str  # see models.sharding.join_process_group
    device: str  # "cpu" or "cuda"
    threads: int  # torch threads
    sequence_parallel: int = 1  # number of consecutive ranks that share every sequence; divides world_size
    engine_node: str | None = (
        None  # node for whose engines this rank writes weights into shared memory; None: it writes none
    )


def initialize_rank(
    placement: RankPlacement, fsdp_size: int = -1
) -> tuple[DeviceMesh, SequenceGroup | None, dist.ProcessGroup | None]:
    """Initialize this process as a rank (a collective). `fsdp_size` ranks share one copy of the model; -1 = all.

    Returns the model's mesh, the group of ranks that share every sequence (None without sequence parallelism), and the
    group of ranks that together have every row once (None: all ranks).
    """
    torch.set_num_threads(placement.threads)  # Ray starts its processes with one thread
    if placement.device == "cuda":
        torch.cuda.set_device(placement.rank % torch.cuda.device_count())  # a Ray actor sees its own GPU only
    join_process_group(placement.device, placement.rank, placement.world_size, placement.init_method)
    mesh = make_mesh(placement.device, fsdp_size)
    return mesh, *create_sequence_groups(placement.device, placement.sequence_parallel)


def shut_down_rank() -> None:
    """Destroy the process group.

    A gloo thread may still be releasing tensors. If it needs the interpreter while the interpreter exits, the process
    aborts. The garbage collection gives the thread time to finish.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
