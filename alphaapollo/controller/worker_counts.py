"""How many processes of each role: decided once, before any of them starts. Which node and GPU: ray_placement.py.

The number of engines comes from config/resolve.py. A generation, which has engines alone, has engine_crew.py:
EnginePlan.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.config.resolve import engine_processes, engine_threads
from alphaapollo.config.schema import Rollout, Trainer
from alphaapollo.config.schema.base import Device

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """What one node has: this machine, or the largest node of the cluster that RAY_ADDRESS names."""

    num_cores: int
    num_gpus: int
    gpu_memory: int = 0  # bytes of one GPU; 0: none, or not known
    memory: int = 0  # bytes of the machine's own; 0: not known
    bfloat16: str = ""  # the processor's instructions for bfloat16 products, e.g. amx_bf16; empty: none, or not known

    def memory_for(self, device: Device) -> int:
        """Bytes that training there may fill: of one GPU, or on a CPU of the machine. 0: not known."""
        return self.memory if device == "cpu" else self.gpu_memory


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """Training ranks alone. A rank is a GPU, or a process on a machine without them."""

    device: Device
    num_nodes: int
    ranks_per_node: int
    threads: int  # torch threads of a rank
    sequence_parallel: int = 1  # ranks that share every sequence: consecutive ones

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def data_parallel(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.num_ranks // self.sequence_parallel

    @property
    def words(self) -> str:
        """For the plan."""
        unit = "GPU" if self.device == "cuda" else f"process of {self.threads} thread(s)"
        sequences = f", sequence parallel {self.sequence_parallel}" if self.sequence_parallel > 1 else ""
        return f"{self.num_ranks} x {unit} on {self.num_nodes} node(s), FSDP2{sequences}"


@dataclass(frozen=True, kw_only=True)
class Placement(RankCounts):
    """Where everything runs."""

    num_engines: int
    tensor_parallel: int  # GPUs or processes an engine
    colocate: bool  # engines use the training ranks' GPUs
    engine_threads: int  # of an engine's process on a CPU
    critic: bool
    reward_model: bool

    @property
    def num_gpus(self) -> int:
        """That the run uses; 0 on a machine without."""
        if self.device == "cpu":
            return 0
        return self.num_ranks + (0 if self.colocate else self.num_engines * self.tensor_parallel)

    @property
    def shares_gpus(self) -> bool:
        """Engines and trainers hold the same GPUs, one after the other."""
        return self.device == "cuda" and self.colocate

    def role_lines(self) -> dict[str, str]:
        """role -> where it runs, for the plan."""
        engine = "cuda" if self.device == "cuda" else f"cpu of {self.engine_threads} thread(s)"
        where = self.words
        tensor_parallel = f", tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        shared = " on the training GPUs" if self.device == "cuda" and self.colocate else ""
        roles = {"actor and reference": where}
        if self.critic:
            roles["critic"] = where
        if self.reward_model:
            roles["reward model"] = where
        roles["rollout engines"] = f"{self.num_engines} x {engine}{tensor_parallel}{shared}"
        return roles


def detect_machine() -> Machine:
    """This machine's cores (that we may use), GPUs and memory."""
    import torch

    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=torch.cuda.device_count(),
        gpu_memory=smallest_gpu(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bfloat16=bfloat16_units(CPU_INFO.read_text() if CPU_INFO.exists() else ""),
    )


def bfloat16_units(cpu_info: str) -> str:
    """By the flags in /proc/cpuinfo; the faster ones first."""
    flags = {flag for line in cpu_info.splitlines() if line.startswith("flags") for flag in line.split()}
    return next((unit for unit in ("amx_bf16", "avx512_bf16") if unit in flags), "")


def smallest_gpu() -> int:
    """Bytes of the smallest GPU, by the driver's own tool: asking CUDA would start it in this process. 0: not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    asked = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return min((int(line) * 2**20 for line in answer.stdout.split("\n") if line.strip().isdigit()), default=0)


def make_placement(
    trainer: Trainer,
    rollout: Rollout,
    device: Device,
    machine: Machine,
    sequence_parallel: int,
    critic: bool,
    reward_model: bool,
) -> Placement:
    """Of a checked configuration; `rollout` is resolved (config/resolve.py)."""
    assert rollout.num_engines is not None
    apart = trainer.async_mode == "separate"
    return Placement(
        device=device,
        num_nodes=trainer.nnodes,
        ranks_per_node=trainer.n_gpus_per_node,
        num_engines=rollout.num_engines,
        tensor_parallel=rollout.tensor_model_parallel_size,
        colocate=rollout.colocate,
        threads=trainer.cpu_threads or rank_threads(trainer, rollout, machine),
        engine_threads=engine_threads(rollout, machine.num_cores, trainer.nnodes, apart)
        if rollout.name == "vllm"
        else 1,
        sequence_parallel=sequence_parallel,
        critic=critic,
        reward_model=reward_model,
    )


def rank_threads(trainer: Trainer, rollout: Rollout, machine: Machine) -> int:
    """Torch threads of a training rank, where nobody chose: its share of a node's cores, but for those that engines
    have for themselves in async_mode=separate. `rollout` has a number of engines."""
    cores = machine.num_cores
    if trainer.async_mode == "separate":
        threads = engine_threads(rollout, cores, trainer.nnodes, own_cores=True)
        cores -= threads * engine_processes(rollout, trainer.nnodes)
    return max(1, cores // trainer.n_gpus_per_node)
