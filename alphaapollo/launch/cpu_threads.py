"""How many threads compute on a CPU, settled before anything starts.

Trainers and engines work in turns there, so each side has all the cores, shared among its own processes (but for
trainer.async_mode=separate, where each has its own). The count is part of what a run computes: where a library cuts one
sum among its threads, another count may round otherwise. oneDNN does so from eight threads on, in the long sums of a
weight's gradient; MKL from two on, in products of few rows. So a run notes its counts in config.yaml, and keeps them
where it goes on, on a machine with other cores too.
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
class Side:
    """Processes that compute at the same time."""

    key: str  # that counts the threads of each
    own: int  # this machine's choice
    sizes: tuple[str, ...] = ()  # keys that count the processes: with others the earlier count is not kept


def choose_threads(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """The counts as given, else those of the run that is gone on with, else by this machine's cores; and what to tell.
    On GPUs the configuration stays as it is.

    Raises ValueError for an earlier run that cannot be read, as find_start does.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if resolve_device(trainer.device, machine.num_gpus) != "cpu":
        return config, []
    rollout = rollout.model_copy(update={"num_engines": num_engines(rollout, "cpu", trainer.num_ranks)})
    sides = []
    if rollout.name == "vllm":
        own_cores = trainer.async_mode == "separate"
        sides.append(Side(ENGINE, engine_threads(rollout, machine.num_cores, trainer.nnodes, own_cores), PROCESSES))
    sides.append(Side(TRAINER, rank_threads(trainer, rollout, machine), PROCESSES))
    return _settle(config, sides, earlier_config(config))


def choose_tuning_threads(config: T, machine: Machine) -> tuple[T, list[str]]:
    """As `choose_threads`, for fine-tuning."""
    if resolve_device(config.trainer.device, machine.num_gpus) != "cpu":
        return config, []
    side = Side(TRAINER, max(1, machine.num_cores // config.trainer.n_gpus_per_node), RANKS)
    return _settle(config, [side], earlier_config(config))


def _settle(config: C, sides: Sequence[Side], earlier: Mapping[str, Any]) -> tuple[C, list[str]]:
    notices = []
    for side in sides:
        if value_of(config, side.key) is not None:
            continue
        kept = _lookup(earlier, side.key)
        if kept is not None and any(_lookup(earlier, key) != value_of(config, key) for key in side.sizes):
            kept = None
        if kept is not None and kept != side.own:
            notices.append(
                f"{side.key}={kept}, as at the run's earlier start: it goes on bit for bit with that count. Of this "
                f"machine's cores it would be {side.own}; {side.key}={side.own} takes them, and may round otherwise."
            )
        config = with_value(config, side.key, side.own if kept is None else kept)
    return config, notices


def _lookup(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
