"""Number of threads on a CPU, chosen before anything starts.

Trainers and engines alternate, so each side gets all cores, divided among its processes (with
trainer.async_mode=separate each side has cores of its own). The number affects results: a library that divides a sum
among its threads may round differently with another number. oneDNN does so from eight threads on, in the long sums of
weight gradients; MKL from two on, in products of few rows. A run therefore saves its numbers in config.yaml and keeps
them when it resumes on a machine with other cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from alphaapollo.config.keys import value_of, with_value
from alphaapollo.config.resolve import engine_threads, num_engines, resolve_device
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.placement import Machine, rank_threads
from alphaapollo.launch.resume import earlier_config

C = TypeVar("C", bound=BaseModel)
T = TypeVar("T", bound=TuningConfig)
TRAINER = "trainer.cpu_threads"
ENGINE = "actor_rollout_ref.rollout.cpu_threads"
RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")
PROCESSES = (
    *RANKS,
    "trainer.async_mode",
    "actor_rollout_ref.rollout.num_engines",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)


@dataclass(frozen=True)
class ThreadSetting:
    """Number of threads of processes that compute at the same time."""

    key: str
    default: int  # on this machine
    process_keys: tuple[str, ...] = ()  # numbers of processes: if they have changed, the saved number is not kept


def choose_threads(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """Set the numbers of threads: as configured, else those of the run to resume, else by this machine's cores. Returns
    notices, too. On GPUs nothing changes.

    Raises:
        ValueError: the earlier run cannot be read, as in find_start.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if resolve_device(trainer.device, machine.num_gpus) != "cpu":
        return config, []
    rollout = rollout.model_copy(update={"num_engines": num_engines(rollout, "cpu", trainer.num_ranks)})
    settings = []
    if rollout.name == "vllm":
        own_cores = trainer.async_mode == "separate"
        settings.append(
            ThreadSetting(ENGINE, engine_threads(rollout, machine.num_cores, trainer.nnodes, own_cores), PROCESSES)
        )
    settings.append(ThreadSetting(TRAINER, rank_threads(trainer, rollout, machine), PROCESSES))
    return _settle(config, settings, earlier_config(config))


def choose_tuning_threads(config: T, machine: Machine) -> tuple[T, list[str]]:
    """Like `choose_threads`, for fine-tuning."""
    if resolve_device(config.trainer.device, machine.num_gpus) != "cpu":
        return config, []
    setting = ThreadSetting(TRAINER, max(1, machine.num_cores // config.trainer.n_gpus_per_node), RANKS)
    return _settle(config, [setting], earlier_config(config))


def _settle(config: C, settings: Sequence[ThreadSetting], earlier: Mapping[str, Any]) -> tuple[C, list[str]]:
    notices = []
    for setting in settings:
        if value_of(config, setting.key) is not None:
            continue
        kept = _lookup(earlier, setting.key)
        if kept is not None and any(_lookup(earlier, key) != value_of(config, key) for key in setting.process_keys):
            kept = None
        if kept is not None and kept != setting.default:
            notices.append(
                f"{setting.key}={kept}, as at the run's earlier start, so that it resumes bit for bit. This machine's "
                f"cores allow {setting.key}={setting.default}, which may round differently."
            )
        config = with_value(config, setting.key, setting.default if kept is None else kept)
    return config, notices


def _lookup(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
