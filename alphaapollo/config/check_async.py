"""Whether what works beside generation can work as asked: asynchronous training (docs/async.md), the reference."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.notices import ROLLOUT
from alphaapollo.config.resolve import num_engines
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device

CORRECTION = "algorithm.rollout_correction"


def check_async(config: Config, device: Device, num_cores: int) -> Iterator[str]:
    """One line for each combination that cannot work, with the key to turn. num_cores: of one node."""
    trainer = config.trainer
    yield from _check_reference_ahead(config, device)
    if trainer.async_mode is None:
        return
    if trainer.max_staleness:
        yield from _check_stale_samples(config)
        yield from _check_kept_requests(config, device)
    if trainer.async_mode == "separate":
        yield from _check_own_places(config, device, num_cores)


def _check_reference_ahead(config: Config, device: Device) -> Iterator[str]:
    key, role = "actor_rollout_ref.ref.log_probs_ahead", config.actor_rollout_ref
    if role.ref.log_probs_ahead is not True:
        return
    if mode := config.trainer.async_mode:
        yield (
            f"{key}=true is the synchronous loop's, and trainer.async_mode={mode}: that generates beside the update, "
            f"or carries what is unfinished. Set {key}=auto, or trainer.async_mode=null."
        )
    elif device == "cuda" and role.rollout.colocate:
        yield (
            f"{key}=true: the engines share the training GPUs and hold their memory while they generate. Set "
            f"{ROLLOUT}.colocate=false and leave them GPUs of their own (trainer.n_gpus_per_node), or {key}=auto."
        )


def _check_stale_samples(config: Config) -> Iterator[str]:
    correction, asked = config.algorithm.rollout_correction, f"trainer.max_staleness={config.trainer.max_staleness}"
    why = (
        f"{asked}: tokens come from older weights than those that are trained, and nothing corrects for that between "
        "the trainer's own log-probs and the engine's"
    )
    if correction.bypass:
        yield (
            f"{why}, for {CORRECTION}.bypass=true takes the engine's as the old ones. Set {CORRECTION}.bypass=false "
            f"{CORRECTION}.method=tis, or trainer.max_staleness=0."
        )
    elif correction.method is None:
        yield f"{why}. Set {CORRECTION}.method=tis (or mask), or trainer.max_staleness=0."


def _check_kept_requests(config: Config, device: Device) -> Iterator[str]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if rollout.lora == "adapter":
        yield (
            f"{ROLLOUT}.lora=adapter: an answer keeps the adapter that it began with, so none can go on with new "
            f"weights. Set {ROLLOUT}.lora=merged, or trainer.max_staleness=0."
        )
    if rollout.router_replay:
        yield (
            f"{ROLLOUT}.router_replay=true: an answer over several versions of the weights has no one list of experts "
            f"to replay. Set {ROLLOUT}.router_replay=false, or trainer.max_staleness=0."
        )
    if trainer.keep_kv_cache and rollout.name == "hf":
        yield f"trainer.keep_kv_cache=true: {ROLLOUT}.name=hf keeps no cache over a pause. Set it false."
    sleeps = device == "cuda" and rollout.colocate and rollout.free_cache_engine
    if trainer.keep_kv_cache and sleeps:
        yield (
            "trainer.keep_kv_cache=true: engines that share the training GPUs give their cache up while those train. "
            f"Set it false, or trainer.async_mode=separate {ROLLOUT}.colocate=false."
        )


def _check_own_places(config: Config, device: Device, num_cores: int) -> Iterator[str]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    other = "trainer.async_mode=carry takes turns on one pool"
    if device == "cuda":
        if rollout.colocate:
            yield (
                "trainer.async_mode=separate: generation goes on beside the update, so engines need GPUs of their own, "
                f"and {ROLLOUT}.colocate=true has them share the training GPUs. Set {ROLLOUT}.colocate=false and leave "
                f"them some (trainer.n_gpus_per_node), or: {other}."
            )
        return
    engines = -(-num_engines(rollout, device, trainer.num_ranks) // trainer.nnodes)
    for_engines = engines * rollout.tensor_model_parallel_size * (rollout.cpu_threads or 1)
    threads = trainer.n_gpus_per_node * (trainer.cpu_threads or 1)
    if threads + for_engines > num_cores:
        yield (
            f"trainer.async_mode=separate: engines and training ranks need cores of their own, {for_engines} and "
            f"{threads} a node, and there are {num_cores}. Lower trainer.cpu_threads, trainer.n_gpus_per_node, "
            f"{ROLLOUT}.num_engines or {ROLLOUT}.cpu_threads; or: {other}."
        )
