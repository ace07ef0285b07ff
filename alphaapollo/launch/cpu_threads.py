"""Number of threads on a CPU, chosen before anything starts.

Trainers and engines alternate, so each side gets all cores, divided among its processes (with
trainer.async_mode=separate each side has cores of its own). The number affects results: a library that divides a sum
among its threads may round differently with another number. oneDNN does so from eight threads on, in the long sums of
weight gradients; MKL from two on, in products of few rows. A run therefore saves its numbers in config.yaml and keeps
them when it resumes on a machine with other cores.
"""

from __future__ import annotations

from typing import TypeVar

from alphaapollo.config.keys import replace_value
from alphaapollo.config.load import flatten_maps
from alphaapollo.config.resolve import count_engine_threads, count_engines, resolve_device
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.placement import Machine, rank_threads
from alphaapollo.launch.resume import read_earlier_config

C = TypeVar("C", bound=Config | TuningConfig)
TRAINER = "trainer.cpu_threads"
ENGINE = "actor_rollout_ref.rollout.cpu_threads"
PROCESSES = (
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.async_mode",
    "actor_rollout_ref.rollout.num_engines",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)
"""Keys with numbers of processes. If one has changed, saved numbers of threads are not kept."""


def choose_threads(config: C, machine: Machine) -> tuple[C, list[str]]:
    """Set the numbers of threads: as configured, else those of the run to resume, else by this machine's cores. Returns
    notices, too. On GPUs nothing changes.

    Raises:
        ValueError: the earlier run cannot be read, as in find_start.
    """
    if resolve_device(config.trainer.device, machine.num_gpus) != "cpu":
        return config, []
    own, earlier, notices = flatten_maps(config.model_dump()), flatten_maps(read_earlier_config(config)), []
    has_same_processes = all(earlier.get(key) == own.get(key) for key in PROCESSES)
    for key, default in _default_threads(config, machine).items():
        if own[key] is not None:
            continue
        kept = earlier.get(key) if has_same_processes else None
        if kept not in (None, default):
            notices.append(
                f"{key}={kept}, as at the run's earlier start, so that it resumes bit for bit. This machine's cores "
                f"allow {key}={default}, which may round differently."
            )
        config = replace_value(config, key, default if kept is None else kept)
    return config, notices


def _default_threads(config: Config | TuningConfig, machine: Machine) -> dict[str, int]:
    """Numbers of threads on this machine, by key."""
    trainer = config.trainer
    if isinstance(config, TuningConfig):
        return {TRAINER: max(1, machine.num_cores // trainer.n_gpus_per_node)}
    rollout = config.actor_rollout_ref.rollout
    rollout = rollout.model_copy(update={"num_engines": count_engines(rollout, "cpu", trainer.num_ranks)})
    threads = {TRAINER: rank_threads(config.trainer, rollout, machine)}
    if rollout.name != "vllm":
        return threads
    own_cores = config.trainer.async_mode == "separate"
    return {ENGINE: count_engine_threads(rollout, machine.num_cores, trainer.nnodes, own_cores)} | threads
