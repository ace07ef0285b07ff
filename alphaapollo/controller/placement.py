"""Number of processes of each role of a run, decided before they start (their nodes and GPUs: ray_launcher.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alphaapollo.config.resolve import count_engine_gpus, count_engine_processes, count_engine_threads, count_engines
from alphaapollo.config.schema import Config, Rollout, Trainer, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.planned_device import get_planned_gpu_memory


@dataclass(frozen=True)
class Machine:
    """Resources of one node: of this machine, or of the largest node of the cluster at RAY_ADDRESS."""

    num_cores: int  # 0: unknown
    num_gpus: int
    gpu_memory: int = 0  # bytes of one GPU; 0: no GPU, or unknown
    memory: int = 0  # bytes of main memory; 0: unknown
    gpu_name: str = ""  # of nvidia-smi, or trainer.planned_device; "": no GPU, or unknown


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Number of training ranks and engines of a command, with the GPUs and threads of each.

    Each training rank is a process: with one GPU, or with none on machines without GPUs. Fine-tuning has no engines,
    and generation has no training ranks."""

    device: Device
    num_nodes: int = 1
    ranks_per_node: int = 0
    threads: int = 1  # torch threads of a rank
    sequence_parallel: int = 1  # consecutive ranks that share every sequence
    num_engines: int = 0
    tensor_parallel: int = 1  # GPUs or processes per engine
    colocate: bool = False  # engines use the training ranks' GPUs
    engine_nodes: int = 0  # nodes for engines only
    gpus_per_engine_node: int = 0
    engine_threads: int = 1  # of an engine's process on a CPU
    has_critic: bool = False
    has_reward_model: bool = False

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks; with sequence parallelism, each is a group of ranks with the same batch."""
        return self.num_ranks // self.sequence_parallel

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the run uses; 0 on CPUs."""
        if self.device == "cpu":
            return 0
        return self.num_ranks + (0 if self.colocate else self.num_engines * self.tensor_parallel)

    @property
    def fits_in_one_process(self) -> bool:
        """Whether the command has at most one training rank and one engine, which can run in the driver's process."""
        return max(self.num_ranks, self.num_engines) <= 1

    @property
    def shares_gpus(self) -> bool:
        """Whether the engines and the training ranks take turns on the same GPUs."""
        return self.device == "cuda" and self.colocate

    def count_workers(self, role: str) -> int:
        return self.num_engines if role == "rollout" else self.num_ranks

    def assign_gpus(self, role: str, gpus: Sequence[str]) -> list[dict[str, str]]:
        """Return the CUDA_VISIBLE_DEVICES setting of each worker of a role; {} without GPUs. gpus: those of the ranks,
        followed by those of the engines unless the engines share GPUs with the ranks."""
        is_engine, count = role == "rollout", self.count_workers(role)
        if self.device != "cuda":
            return [{}] * count
        size = self.tensor_parallel if is_engine else 1
        first = self.num_ranks if is_engine and not self.colocate else 0
        starts = range(first, first + count * size, size)
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[start : start + size])} for start in starts]

    def describe_ranks(self) -> str:
        """Return e.g. "8 x GPU on 1 node(s), FSDP2", for the printed plan."""
        unit = "GPU" if self.device == "cuda" else f"process of {self.threads} thread(s)"
        sequences = f", sequence parallel {self.sequence_parallel}" if self.sequence_parallel > 1 else ""
        return f"{self.num_ranks} x {unit} on {self.num_nodes} node(s), FSDP2{sequences}"

    def describe_roles(self) -> dict[str, str]:
        """Return role -> description of its processes, e.g. "4 x cuda", for the printed plan."""
        engine = "cuda" if self.device == "cuda" else f"cpu of {self.engine_threads} thread(s)"
        tensor_parallel = f", tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        nodes = f" on {self.engine_nodes} node(s)" if self.engine_nodes else ""
        where = " on the training GPUs" if self.shares_gpus else nodes
        exists = {"actor and reference": True, "critic": self.has_critic, "reward model": self.has_reward_model}
        roles = [role for role in exists if exists[role]]
        return dict.fromkeys(roles, self.describe_ranks()) | {
            "rollout engines": f"{self.num_engines} x {engine}{tensor_parallel}{where}"
        }


def detect_machine() -> Machine:
    """Return the CPU cores (within this process's affinity), GPUs and memory of this machine."""
    import torch

    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=torch.cuda.device_count(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **query_smallest_gpu(),
    )


def count_gpus_of_node(config: Config | TuningConfig) -> int:
    """Return how many GPUs of a node a run uses: those of its ranks, and those of engines that do not share them."""
    if not isinstance(config, Config) or config.actor_rollout_ref.rollout.colocate:
        return config.trainer.n_gpus_per_node
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    engines = 0 if rollout.nnodes else count_engines(rollout, "cuda", count_engine_gpus(rollout, trainer))
    return trainer.n_gpus_per_node + -(-engines // trainer.nnodes) * rollout.tensor_model_parallel_size


def make_planned_machine(config: Config | TuningConfig) -> Machine:
    """Return a node with the GPUs that trainer.planned_device names: as many as the run uses, at least eight."""
    num_gpus, device = max(8, count_gpus_of_node(config)), config.trainer.planned_device
    return Machine(num_cores=0, num_gpus=num_gpus, gpu_memory=get_planned_gpu_memory(device), gpu_name=device)


def list_visible_gpus(num_gpus: int) -> list[str]:
    """Return the ids of this machine's GPUs, or of those that CUDA_VISIBLE_DEVICES already selects."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(num_gpus)]


def query_smallest_gpu() -> dict[str, Any]:
    """Return the fields gpu_memory and gpu_name of Machine for the smallest GPU of this machine; {}: unknown. Uses
    nvidia-smi, because torch would initialize CUDA in this process."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    fields = [line.partition(", ") for line in result.stdout.splitlines() if line.partition(",")[0].strip().isdigit()]
    mib, name = min(((int(memory), name.strip()) for memory, _, name in fields), default=(0, ""))
    return {"gpu_memory": mib * 2**20, "gpu_name": name}


def make_placement(config: Config, rollout: Rollout, device: Device, machine: Machine, has_critic: bool) -> Placement:
    """Return the number and size of all workers of an RL run. rollout: section with resolved defaults."""
    trainer = config.trainer
    assert rollout.num_engines is not None
    return Placement(
        device=device,
        num_nodes=trainer.nnodes,
        ranks_per_node=trainer.n_gpus_per_node,
        num_engines=rollout.num_engines,
        tensor_parallel=rollout.tensor_model_parallel_size,
        colocate=rollout.colocate,
        engine_nodes=rollout.nnodes,
        gpus_per_engine_node=(rollout.n_gpus_per_node or trainer.n_gpus_per_node) if device == "cuda" else 0,
        threads=trainer.cpu_threads or choose_threads_per_rank(trainer, rollout, machine),
        engine_threads=count_engine_threads(
            rollout, machine.num_cores, trainer.nnodes, runs_during_training=trainer.async_mode == "separate"
        )
        if rollout.has_engine_process
        else 1,
        sequence_parallel=config.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
        has_critic=has_critic,
        has_reward_model=config.reward_model.enable,
    )


def choose_threads_per_rank(trainer: Trainer, rollout: Rollout, machine: Machine) -> int:
    """Return the default number of torch threads per training rank: an equal share of the node's cores. With
    trainer.async_mode=separate, only the cores that no engine uses are shared."""
    cores = machine.num_cores
    if trainer.async_mode == "separate" and not rollout.nnodes:
        threads = count_engine_threads(rollout, cores, trainer.nnodes, runs_during_training=True)
        cores -= threads * count_engine_processes(rollout, trainer.nnodes)
    return max(1, cores // trainer.n_gpus_per_node)
