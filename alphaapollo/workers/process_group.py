"""Initialization of torch.distributed and its process groups on a training rank."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.utils.deterministic

from alphaapollo.config.schema import Fsdp
from alphaapollo.models.sharding import ModelMesh, join_process_group, make_mesh
from alphaapollo.models.ulysses import SequenceGroup, create_sequence_groups
from alphaapollo.processes import entry_point
from alphaapollo.processes.allocator import keep_freed_memory

WITHOUT_REPLICAS = Fsdp()
NO_RENDEZVOUS = ""  # init_method if there is a single rank


@dataclass(frozen=True)
class RankPlacement:
    """Rank number, device, and process group of one training rank."""

    rank: int
    world_size: int
    init_method: str  # see models.sharding.join_process_group
    device: str  # "cpu" or "cuda"
    num_threads: int  # torch threads
    sequence_parallel_size: int = 1  # number of consecutive ranks that share every sequence; divides world_size
    engine_node: str | None = None  # node of the engines for which this rank writes weights to shared memory


def initialize_rank(
    placement: RankPlacement, fsdp: Fsdp = WITHOUT_REPLICAS
) -> tuple[ModelMesh, SequenceGroup | None, dist.ProcessGroup | None]:
    """Initialize torch.distributed in this process (a collective).

    Returns the device meshes of the model, the sequence-parallel group of this rank (None without sequence
    parallelism), and its data-parallel group, which has one rank of each sequence-parallel group (None: all ranks).
    """
    torch.set_num_threads(placement.num_threads)  # Ray starts its processes with one thread
    if placement.device == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(placement.rank % torch.cuda.device_count())  # a Ray actor sees its own GPU only
        if fsdp.full_determinism:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    join_process_group(placement.device, placement.rank, placement.world_size, placement.init_method)
    mesh = make_mesh(placement.device, fsdp.fsdp_size, fsdp.ep_size)
    return mesh, *create_sequence_groups(placement.device, placement.sequence_parallel_size)


def shut_down_rank() -> None:
    """Destroy the torch.distributed process group of this process.

    A gloo thread may still be releasing tensors. If it needs the interpreter while the interpreter exits, e.g. after a
    user's script, the process aborts. Collecting garbage gives the thread time to finish.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        if not entry_point.exits_at_once:
            gc.collect()
