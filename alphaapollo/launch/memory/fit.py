"""Fit a run to the memory of its device: choose the settings that are `auto`, and suggest settings that save memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from alphaapollo.config.keys import format_value, replace_value
from alphaapollo.config.resolve import get_resolved
from alphaapollo.config.schema import Config, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.memory.model import count_loading_bytes, load_model_sizes
from alphaapollo.launch.memory.plan import GIB, MemoryPlan, count_kv_token_bytes, has_critic, plan_memory

CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
DEFAULT_CACHE = Rollout().kv_cache_gib
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BUDGET, ENGINE_SHARE = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.gpu_memory_utilization"
MAX_TOKENS = 16384  # tokens of a micro-batch, if they fit
MIN_TOKENS = 2048  # smaller micro-batches cost more time than gradient checkpointing

Settings = Mapping[str, object]  # {key: value}


def fit_config_to_memory(
    config: Config, device: Device, capacity: int, is_gradient_checkpointing_auto: bool, host_memory: int = 0
) -> tuple[Config, MemoryPlan]:
    """Plan the memory of an RL run, and choose gradient checkpointing, the token budget and the engines' share of a GPU
    where they are `auto`. Returns the configuration and the plan, with a `problem` if the run cannot fit.

    capacity: as for plan_memory. host_memory: bytes of host memory of a GPU node; 0: unknown.
    """
    free_keys = {CHECKPOINTING} if is_gradient_checkpointing_auto else set()
    if config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == "auto":
        free_keys.add(BUDGET)
        config = replace_values(config, {BUDGET: MAX_TOKENS})
    options = (
        {key: value for key, value in option.items() if key in free_keys}
        for option in list_memory_saving_settings(config, device)
    )
    chosen, _ = find_cheapest_settings(config, device, capacity, lambda plan: plan.has_headroom_in_update, options)
    config = replace_values(config, chosen)
    plan = plan_memory(config, device, capacity)
    plan = plan.add_shortage(partial(_suggest_memory_settings, config, device, capacity, host_memory))
    if plan.on_gpu:
        config = replace_values(config, {ENGINE_SHARE: plan.engine_share})
    if problem := plan.problem or _explain_missing_host_memory(config, plan, host_memory):
        return config, replace(plan, problem=problem)
    return config, plan.add_checkpoint_copies(device, host_memory)


def _explain_missing_host_memory(config: Config, plan: MemoryPlan, host_memory: int) -> str:
    """Return why the host memory of a GPU node is too small, or "" if it may be enough."""
    loading = count_loading_bytes(config.actor_rollout_ref.model)
    needs = {
        "offloading needs": (
            plan.offloaded_bytes,
            "Unset some of the offload keys of fsdp_config, or raise trainer.nnodes",
        ),
        "loading the model needs": (loading, "Use nodes with more memory, or save the model in bfloat16"),
    }
    for need, (size, fix) in needs.items():
        if plan.on_gpu and 0 < host_memory < size:
            needed = f"{size / GIB:.0f} GiB of host memory per node, but a node has {host_memory / GIB:.0f} GiB"
            return f"memory: {need} {needed}. {fix}."
    return ""


def _suggest_memory_settings(config: Config, device: Device, capacity: int, host_memory: int) -> str:
    def is_acceptable(plan: MemoryPlan) -> bool:
        return plan.is_likely and (not host_memory or plan.offloaded_bytes <= host_memory)

    settings, found = find_cheapest_settings(config, device, capacity, is_acceptable)
    if not found:
        unit = "GPUs" if device == "cuda" else "machines"
        return f"No setting makes the run fit on this number of {unit}. Raise trainer.nnodes."
    return f"Set {' '.join(f'{key}={format_value(value)}' for key, value in settings.items())}."


def find_cheapest_settings(
    config: Config,
    device: Device,
    capacity: int,
    is_acceptable: Callable[[MemoryPlan], bool],
    options: Iterator[Settings] | None = None,
) -> tuple[Settings, bool]:
    """Return the settings that cost the least time among those whose memory plan satisfies `is_acceptable`, and True;
    or those that save the most memory, and False, if no settings do. options: by default all that save memory."""

    def is_plan_acceptable_with(settings: Settings) -> bool:
        return is_acceptable(plan_memory(replace_values(config, settings), device, capacity))

    settings: dict[str, object] = {}
    options = options or list_memory_saving_settings(config, device)
    while not is_plan_acceptable_with(settings):
        option = next(options, None)
        if option is None:
            return settings, False
        settings |= option
    for key in reversed(list(settings)):
        fewer = {other: value for other, value in settings.items() if other != key}
        settings = fewer if is_plan_acceptable_with(fewer) else settings
    return settings, True


def list_memory_saving_settings(config: Config, device: Device) -> Iterator[Settings]:
    """Yield settings that save memory, each in addition to those before it. Those that cost the least time come first:
    smaller micro-batches, gradient checkpointing, offloading."""
    role = config.actor_rollout_ref
    budget, longest = get_resolved(role.actor.ppo_max_token_len_per_gpu), config.data.max_length
    longest = -(-longest // role.actor.ulysses_sequence_parallel_size)
    smaller = [{BUDGET: size} for size in halve(budget, max(longest, MIN_TOKENS))]
    yield from smaller
    if not role.model.enable_gradient_checkpointing:
        yield {CHECKPOINTING: True, BUDGET: budget}
        yield from smaller
    trained = [ACTOR, *["critic"] * has_critic(config)]
    sizes, parallel = load_model_sizes(role.model), role.rollout.tensor_model_parallel_size
    if device == "cuda":
        for size in range(parallel + 1, config.trainer.n_gpus_per_node + 1):
            if config.trainer.n_gpus_per_node % size == 0 and sizes.num_heads % size == 0:
                yield {f"{ROLLOUT}.tensor_model_parallel_size": size}
        yield from ({f"{section}.fsdp_config.optimizer_offload": True} for section in trained)
        if config.needs_reference:
            yield {"actor_rollout_ref.ref.fsdp_config.param_offload": True}
        yield from ({f"{key}.fsdp_config.param_offload": True} for key in config.teacher.local_models)
    yield from ({BUDGET: size} for size in halve(min(budget, MIN_TOKENS), longest))
    if device == "cpu":
        needed = count_kv_token_bytes(role.rollout, sizes) * config.data.max_length / GIB
        yield {f"{ROLLOUT}.kv_cache_gib": max(DEFAULT_CACHE, math.ceil(10 * needed) / 10)}
        return
    if role.rollout.gpu_memory_utilization != "auto":
        yield {ENGINE_SHARE: "auto"}
    for key in ("param_offload", "offload_policy"):
        yield from ({f"{section}.fsdp_config.{key}": True} for section in trained)


def get_max_tokens(budget: int | Literal["auto"]) -> int:
    """Return a token budget as configured or, if it is `auto`, the one with which the memory plan begins."""
    return MAX_TOKENS if budget == "auto" else budget


def halve(budget: int, smallest: int) -> Iterator[int]:
    """Yield budget / 2, budget / 4, ..., and last `smallest`, if it is less than the budget."""
    while budget > smallest:
        budget = max(smallest, budget // 2)
        yield budget


def replace_values(config: Config, values: Settings) -> Config:
    """Return the configuration with the values of dotted keys replaced, e.g. {"trainer.seed": 1}."""
    for key, value in values.items():
        config = replace_value(config, key, value)
    return config
