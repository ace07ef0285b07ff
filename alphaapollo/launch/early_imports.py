"""Import vLLM in the background, on another core, while a command imports its own libraries and checks its inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from alphaapollo.config.resolve import resolve_generation, resolve_rollout
from alphaapollo.config.schema import Config, GenerationConfig
from alphaapollo.controller.placement import Machine
from alphaapollo.engines.vllm.settings import build_cpu_environment
from alphaapollo.planning.threads import choose_cpu_threads
from alphaapollo.utils.versions import find_version

RAY_WORKER_MODULES = ("vllm.v1.engine.async_llm", "alphaapollo.controller.preload")


@contextmanager
def import_engine_early(config: object) -> Iterator[None]:
    """Context manager of a command. If the command will start vLLM on this machine's CPU, a fork server starts to
    import vLLM, and what the workers of a local Ray import (controller/ray_fork.py). An engine that turns out to need
    other environment variables starts a fork server of its own."""
    environment = predict_engine_environment(config)
    if environment is None:
        yield
        return
    from alphaapollo.engines.vllm.process import share_engine_fork_server  # imports packages that only vLLM needs

    assert isinstance(config, Config | GenerationConfig)
    with share_engine_fork_server(environment, RAY_WORKER_MODULES if config.trainer.controller == "ray" else ()):
        yield


def predict_engine_environment(config: object) -> Mapping[str, str] | None:
    """Return the environment variables of the command's vLLM engines on this machine's CPU. None: it starts no such
    engine, or this is not known yet."""
    if not isinstance(config, Config | GenerationConfig) or config.trainer.dry_run or os.environ.get("RAY_ADDRESS"):
        return None
    if not (find_version("torch") or "").endswith("+cpu"):
        return None
    machine = Machine(num_cores=len(os.sched_getaffinity(0)), num_gpus=0, gpu_memory=0, memory=0)
    with suppress(ValueError):  # the checks will report it
        if isinstance(config, GenerationConfig):
            model, (_, rollout) = config.model, resolve_generation(config, 0, machine.num_cores)
        else:
            config, _ = choose_cpu_threads(config, machine)
            role = config.actor_rollout_ref
            model, rollout = role.model, resolve_rollout(role.rollout, role.model, "cpu", config.trainer.num_ranks)
        return build_cpu_environment(rollout, model.path) if rollout.name == "vllm" else None
    return None
