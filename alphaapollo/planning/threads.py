"""Choose the CPU threads of each process of a run, which a resumed run keeps.

Trainers and engines alternate, so each of them gets all cores, divided among its processes. With
trainer.async_mode=separate they have separate cores. The number of threads affects rounding, because libraries split
sums among threads: oneDNN does so with eight or more threads (weight gradients), MKL with two or more (products of
few rows). A run therefore saves its thread counts in config.yaml and uses them when it resumes on another machine.
"""

from __future__ import annotations

from typing import TypeVar

from alphaapollo.config.keys import flatten_maps, replace_value
from alphaapollo.config.resolve import count_engine_threads, count_engines, resolve_device
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.placement import Machine, choose_threads_per_rank
from alphaapollo.runs.resume import read_earlier_config

TRAINER = "trainer.cpu_threads"
ENGINE = "actor_rollout_ref.rollout.cpu_threads"
PROCESS_KEYS = (
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.async_mode",
    "actor_rollout_ref.rollout.num_engines",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)
"""Keys that determine the number of processes. If one of them has changed, saved thread counts are not reused."""
TrainingT = TypeVar("TrainingT", bound=Config | TuningConfig)


def choose_cpu_threads(config: TrainingT, machine: Machine) -> tuple[TrainingT, list[str]]:
    """Set the numbers of CPU threads that the user has not set. A resumed run keeps its numbers; a new run gets numbers
    for this machine's cores.

    Returns the configuration (unchanged for training on GPUs) and notices. Raises ValueError as find_start_point does.
    """
    if resolve_device(config.trainer.device, machine.num_gpus) != "cpu":
        return config, []
    values, earlier, notices = flatten_maps(config.model_dump()), flatten_maps(read_earlier_config(config)), []
    has_same_processes = all(earlier.get(key) == values.get(key) for key in PROCESS_KEYS)
    for key, default in _compute_threads_from_cores(config, machine).items():
        if values[key] is not None:
            continue
        saved = earlier.get(key) if has_same_processes else None
        if saved not in (None, default):
            notices.append(
                f"{key}={saved} is taken from the earlier start of the run, so results stay bit-identical. The default "
                f"for this machine's cores, {default}, may round differently."
            )
        config = replace_value(config, key, default if saved is None else saved)
    return config, notices


def _compute_threads_from_cores(config: Config | TuningConfig, machine: Machine) -> dict[str, int]:
    """Return {configuration key: number of threads} for this machine's cores."""
    trainer = config.trainer
    if isinstance(config, TuningConfig):
        return {TRAINER: max(1, machine.num_cores // trainer.n_gpus_per_node)}
    rollout = config.actor_rollout_ref.rollout
    rollout = rollout.model_copy(update={"num_engines": count_engines(rollout, "cpu", trainer.num_ranks)})
    threads = {TRAINER: choose_threads_per_rank(config.trainer, rollout, machine)}
    if not rollout.has_engine_process:
        return threads
    has_own_cores = config.trainer.async_mode == "separate"
    return {ENGINE: count_engine_threads(rollout, machine.num_cores, trainer.nnodes, has_own_cores)} | threads
