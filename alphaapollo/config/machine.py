"""Check whether the machine has the GPUs and CPU cores that a configuration needs."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.resolve import count_engine_gpus, count_engines
from alphaapollo.config.schema import Config, EvolvingConfig, GenerationConfig, Rollout, TuningConfig
from alphaapollo.config.schema.base import Device, Section

ROLLOUT = "actor_rollout_ref.rollout"


def find_machine_errors(config: Section, device: Device, num_gpus: int, num_cores: int) -> Iterator[str]:
    """Yield an error for each key that needs more GPUs or CPU cores than a node has (num_gpus, num_cores)."""
    assert isinstance(config, Config | TuningConfig | GenerationConfig | EvolvingConfig)
    if isinstance(config, EvolvingConfig) and not any(model.path for model in config.models.values()):
        return
    if device == "cuda" and not num_gpus:
        yield "trainer.device=cuda, but this machine has no GPU. Set trainer.device=auto or cpu."
        return
    if isinstance(config, EvolvingConfig):
        if device == "cuda":
            yield from _find_shared_gpu_errors(config)
        return
    ranks = config.trainer.n_gpus_per_node
    if device == "cuda" and ranks > num_gpus:
        yield f"trainer.n_gpus_per_node={ranks}, but a node has {num_gpus} GPUs. Set {num_gpus} or less."
    if isinstance(config, Config):
        yield from _find_cpu_engine_errors(ROLLOUT, config.actor_rollout_ref.rollout, device, num_cores)
        if device == "cuda":
            yield from _find_gpu_engine_errors(config, num_gpus)
        yield from _find_concurrency_errors(config, device, num_cores)
    elif isinstance(config, GenerationConfig):
        yield from _find_cpu_engine_errors("rollout", config.rollout, device, num_cores)
        yield from _find_engine_count_errors(config, device)


def find_machine_warnings(config: Section, device: Device, num_cores: int) -> Iterator[str]:
    """Yield a warning for each setting that makes a run slow on this machine."""
    if not isinstance(config, Config) or device != "cpu":
        return
    if config.actor_rollout_ref.rollout.router_replay:
        yield f"{ROLLOUT}.router_replay=true makes engines on a CPU many times slower. Set it to false, or use GPUs."
    if config.trainer.n_gpus_per_node > num_cores:
        key = f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"
        yield f"{key} is slow, because a node has only {num_cores} CPU cores. Set {num_cores} or less."


def _find_cpu_engine_errors(section: str, rollout: Rollout, device: Device, num_cores: int) -> Iterator[str]:
    size = rollout.tensor_model_parallel_size
    if device == "cpu" and size > num_cores:
        yield f"{section}.tensor_model_parallel_size={size} needs {size} cores, but a node has {num_cores}. Lower it."


def _find_gpu_engine_errors(config: Config, num_gpus: int) -> Iterator[str]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    size, per_node, nodes = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node, trainer.nnodes
    if rollout.nnodes:
        per_node, nodes = rollout.n_gpus_per_node or per_node, rollout.nnodes
    if rollout.colocate and not rollout.nnodes and per_node % size and (rollout.num_engines is None or nodes > 1):
        divisors = ", ".join(str(size) for size in range(1, per_node + 1) if per_node % size == 0)
        key = f"{ROLLOUT}.tensor_model_parallel_size={size}"
        yield f"{key} does not divide trainer.n_gpus_per_node={per_node}. Set one of {divisors}."
        return
    engines = count_engines(rollout, "cuda", count_engine_gpus(rollout, trainer))
    free = per_node if rollout.colocate or rollout.nnodes else num_gpus - per_node
    if engines > free // size * nodes:
        where = "shared with training" if rollout.colocate else "not used for training"
        where = "for engines" if rollout.nnodes else where
        each = f" on each of {nodes} nodes" if nodes > 1 else ""
        yield (
            f"{ROLLOUT}.num_engines={engines} with tensor_model_parallel_size={size} needs {engines * size} GPUs, but "
            f"{free} GPUs{each} are {where}. Lower one of them, or change trainer.n_gpus_per_node."
        )


def _find_concurrency_errors(config: Config, device: Device, num_cores: int) -> Iterator[str]:
    """Yield errors for engines that run at the same time as training, but have no separate GPUs or cores."""
    trainer, role = config.trainer, config.actor_rollout_ref
    rollout, is_separate = role.rollout, trainer.async_mode == "separate"
    if device == "cuda" and rollout.colocate and not rollout.nnodes:
        fix = f"needs engines with their own GPUs. Set {ROLLOUT}.colocate=false and a smaller trainer.n_gpus_per_node."
        if is_separate:
            yield f"trainer.async_mode=separate {fix}"
    if is_separate and device == "cpu" and not rollout.nnodes:
        engines = -(-count_engines(rollout, device, trainer.num_ranks) // trainer.nnodes)
        of_engines = engines * rollout.tensor_model_parallel_size * (rollout.cpu_threads or 1)
        of_ranks = trainer.n_gpus_per_node * (trainer.cpu_threads or 1)
        if of_ranks + of_engines > num_cores:
            yield (
                f"trainer.async_mode=separate needs {of_engines} cores for engines and {of_ranks} for training per "
                f"node, but a node has {num_cores}. Lower cpu_threads or the number of ranks and engines, or set "
                "trainer.async_mode=carry."
            )


def _find_engine_count_errors(config: GenerationConfig, device: Device) -> Iterator[str]:
    trainer, rollout = config.trainer, config.rollout
    size = rollout.tensor_model_parallel_size
    engines, fit = count_engines(rollout, device, trainer.num_gpus), trainer.n_gpus_per_node // size * trainer.nnodes
    if trainer.controller == "local" and engines > 1:
        yield f"trainer.controller=local has one engine, not {engines}. Set rollout.num_engines=1, or controller=ray."
    elif device == "cuda" and not 0 < engines <= fit:
        machine = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} x trainer.nnodes={trainer.nnodes}"
        key = f"rollout.tensor_model_parallel_size={size}"
        yield f"{key}: only {fit} engines of this size fit {machine}, but rollout.num_engines={engines}. Lower one."


def _find_shared_gpu_errors(config: EvolvingConfig) -> Iterator[str]:
    own, share = [name for name, model in config.models.items() if model.path], config.rollout.gpu_memory_utilization
    if config.rollout.name == "vllm" and share * len(own) > 1:
        key, fix = "rollout.gpu_memory_utilization", f"Set {1 / len(own):.2f} or less."
        yield f"{key}={share:g} is too much for {len(own)} engines ({', '.join(own)}) on one GPU. {fix}"
