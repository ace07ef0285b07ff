"""Fit a run to the memory of its device: choose the settings that are `auto`, and suggest settings that save memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Literal, TypeVar

import torch

from alphaapollo.config.keys import format_value, get_value, replace_value
from alphaapollo.config.schema import Config, Rollout, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import Machine
from alphaapollo.models.load import load_config
from alphaapollo.planning.memory import GIB, Usage, load_model_sizes
from alphaapollo.planning.memory_plan import (
    DEFAULT_ENGINE_SHARE,
    ROLLOUT,
    USABLE,
    MemoryPlan,
    MemoryRequest,
    count_kv_token_bytes,
    estimate_update_cost,
    has_critic,
    plan_memory,
)

ROLE, ACTOR = "actor_rollout_ref.", "actor_rollout_ref.actor."
CHECKPOINTING = f"{ROLE}model.enable_gradient_checkpointing"
BUDGET, ENGINE_SHARE = f"{ACTOR}ppo_max_token_len_per_gpu", f"{ROLLOUT}.gpu_memory_utilization"
MAX_TOKENS = 16384  # tokens of a micro-batch, if they fit
MIN_TOKENS = 2048  # smaller micro-batches cost more time than gradient checkpointing

ConfigT = TypeVar("ConfigT", bound=Config | TuningConfig)
Settings = Mapping[str, object]  # {key: value}


def fit_to_memory(
    config: ConfigT,
    device: Device,
    capacity: int,
    is_gradient_checkpointing_auto: bool,
    host_memory: int = 0,
    request: MemoryRequest | None = None,
) -> tuple[ConfigT, MemoryPlan]:
    """Plan the memory of a run, and choose gradient checkpointing, the token budget, the ranks that share a model on
    several nodes, and the engines' share of a GPU, where they are `auto`. Returns the configuration and the plan, with
    a `problem` if the run cannot fit.

    capacity: as for plan_memory. host_memory: bytes of host memory of a GPU node; 0: unknown. request: of fine-tuning.
    """
    budget, checkpointing, *sizes = get_memory_keys(config)
    free = {checkpointing} if is_gradient_checkpointing_auto else set()
    if get_value(config, budget) == "auto":
        free.add(budget)
        config = replace_value(config, budget, MAX_TOKENS)
    sizes = [key for key in sizes if get_value(config, key) == -1 and device == "cuda" and config.trainer.nnodes > 1]
    config = replace_values(config, dict.fromkeys(sizes, config.trainer.num_ranks))

    def make_plan(settings: Settings) -> MemoryPlan:
        return plan_memory(replace_values(config, settings), device, capacity, request)

    def fits(settings: Settings) -> bool:
        plan, per_node = make_plan(settings), config.trainer.n_gpus_per_node
        is_on_each_node = any(settings.get(key) == per_node for key in sizes)  # leaves less memory to the engines
        return plan.has_headroom if is_on_each_node else plan.has_headroom_in_update

    options = list_fast_settings(config, device, [*free, *(sizes if capacity else ())], request)
    config = replace_values(config, next(filter(fits, options), options[-1]))
    plan = make_plan({})

    def suggest_settings() -> str:
        options = list_memory_saving_settings(config, device, request)
        settings, found = find_cheapest_settings(
            options,
            lambda settings: (
                (plan := make_plan(settings)).has_headroom and (not host_memory or plan.offloaded_bytes <= host_memory)
            ),
        )
        if found:
            return f"Set {' '.join(f'{key}={format_value(value)}' for key, value in settings.items())}."
        return "No setting makes the run fit on these devices. Raise trainer.nnodes."

    if plan.kv_cache_shortage:
        plan = replace(plan, problem=f"{plan.kv_cache_shortage}. {suggest_settings()}")
    elif not plan.is_possible:
        plan = replace(plan, problem=f"{plan.certain.describe_peak('at least')}. {suggest_settings()}")
    elif not plan.has_headroom:
        shortage = f"{plan.describe_peak('about')}, so the run may end with an out-of-memory error"
        plan = replace(plan, warning=f"{shortage}. {suggest_settings()}")
    if device == "cpu":
        return config, _plan_checkpoint_copies(plan)
    if isinstance(config, Config):
        config = replace_value(config, ENGINE_SHARE, plan.engine_share)
    problem = plan.problem or _explain_missing_host_memory(config, plan, host_memory)
    fits_host = not host_memory or plan.offloaded_bytes + plan.checkpoint_copy_bytes <= USABLE * host_memory
    return config, replace(plan, problem=problem, saves_in_background=fits_host)


def _plan_checkpoint_copies(plan: MemoryPlan) -> MemoryPlan:
    """On a CPU, add the copies from which checkpoints are written in the background, if they fit."""
    copies = Usage({"checkpoint copy": plan.checkpoint_copy_bytes})
    with_copies = replace(plan, phases={name: usage + copies for name, usage in plan.phases.items()})
    return with_copies if with_copies.has_headroom else replace(plan, saves_in_background=False)


def fit_to_memory_if_measurable(
    config: ConfigT,
    device: Device,
    machine: Machine,
    is_gradient_checkpointing_auto: bool,
    request: MemoryRequest | None = None,
) -> tuple[ConfigT, MemoryPlan | None, list[str]]:
    """Do the same, and return notices, too. The plan is None if the sizes of the model cannot be read."""
    capacity = machine.get_training_memory(device)
    try:
        fitted, plan = fit_to_memory(config, device, capacity, is_gradient_checkpointing_auto, machine.memory, request)
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:  # from modeling code of any kind
        failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.!')}"
        if isinstance(config, Config) and config.actor_rollout_ref.rollout.gpu_memory_utilization == "auto":
            config = replace_value(config, ENGINE_SHARE, DEFAULT_ENGINE_SHARE)
        return config, None, [f"memory is not planned, because the sizes of the model cannot be read ({failure})."]
    return fitted, plan, [plan.warning] if plan.warning else []


def _explain_missing_host_memory(config: Config | TuningConfig, plan: MemoryPlan, host_memory: int) -> str:
    """Return why the host memory of a GPU node is too small, or "" if it may be enough. Rank 0 loads the model in the
    dtype of its files."""
    model = config.actor_rollout_ref.model if isinstance(config, Config) else config.model
    loaded = (load_config(model).dtype or torch.float32).itemsize * load_model_sizes(model).parameters
    offload = "Unset some of the offload keys of fsdp_config, or raise trainer.nnodes"
    load = "Use nodes with more memory, or save the model in bfloat16"
    for purpose, size, fix in (("offloading", plan.offloaded_bytes, offload), ("loading the model", loaded, load)):
        if 0 < host_memory < size:
            needed = f"{size / GIB:.0f} GiB of host memory per node, but a node has {host_memory / GIB:.0f} GiB"
            return f"memory: {purpose} needs {needed}. {fix}."
    return ""


def find_cheapest_settings(
    options: Iterable[Settings], is_acceptable: Callable[[Settings], bool]
) -> tuple[Settings, bool]:
    """Return the first acceptable settings, without those that are not needed, and True; or all settings, and False.
    options: each in addition to those before it; those that cost the least time come first."""
    settings: dict[str, object] = {}
    for option in options:
        settings |= option
        if is_acceptable(settings):
            break
    else:
        return settings, False
    for key in reversed(list(settings)):
        fewer = {other: value for other, value in settings.items() if other != key}
        settings = fewer if is_acceptable(fewer) else settings
    return settings, True


def get_memory_keys(config: Config | TuningConfig) -> list[str]:
    """Return the keys of token budget, gradient checkpointing, and ranks that share each trained model."""
    if not isinstance(config, Config):
        return ["data.max_token_len_per_gpu", CHECKPOINTING.removeprefix(ROLE), "fsdp_config.fsdp_size"]
    sections = [ACTOR, *["critic."] * has_critic(config)]
    return [BUDGET, CHECKPOINTING, *(f"{section}fsdp_config.fsdp_size" for section in sections)]


def list_fast_settings(
    config: Config | TuningConfig, device: Device, free: Collection[str], request: MemoryRequest | None = None
) -> list[Settings]:
    """List all values of the `free` keys of `get_memory_keys`, the fastest first. On GPUs, more micro-batches cost
    traffic, and gradient checkpointing costs computation. On CPUs, smaller micro-batches come first."""
    budget, checkpointing, *sizes = get_memory_keys(config)
    trainer, sizes = config.trainer, [key for key in sizes if key in free]
    parts = (int(str(get_value(config, key.replace("fsdp_size", "ep_size")))) for key in sizes)
    of_node = [] if any(trainer.n_gpus_per_node % part for part in parts) else [trainer.n_gpus_per_node]
    budgets = _list_budgets(config, request)
    choices: list[list[Settings]] = [
        [dict.fromkeys(sizes, size) for size in [*of_node, trainer.num_ranks]] if sizes else [{}],
        [{checkpointing: value} for value in ([True] if get_value(config, checkpointing) else [False, True])],
        [{budget: size} for size in budgets if size >= min(budgets[0], MIN_TOKENS) or size == budgets[0]],
    ]
    every: list[Settings] = [
        {k: v for one in chosen for k, v in one.items() if k in free} for chosen in product(*choices)
    ]
    if device == "cpu":
        return every
    return sorted(every, key=lambda one: estimate_update_cost(replace_values(config, one), request).seconds_per_token)


def list_memory_saving_settings(
    config: Config | TuningConfig, device: Device, request: MemoryRequest | None = None
) -> Iterator[Settings]:
    """Yield settings that save memory, each in addition to those before it. Those that cost the least time come first:
    micro-batches and gradient checkpointing, then offloading."""
    budget, checkpointing, *sizes = get_memory_keys(config)
    yield from list_fast_settings(config, device, (budget, checkpointing), request)
    sections, offloads = [key.removesuffix("fsdp_size") for key in sizes], ["offload_policy"]
    frozen, engines = list[Settings](), list[Settings]()
    if isinstance(config, Config):
        offloads = ["param_offload", "offload_policy"]
        role, per_node = config.actor_rollout_ref, config.trainer.n_gpus_per_node
        models = ["actor_rollout_ref.ref"] * config.needs_reference + list(config.teacher.local_models)
        frozen = [{f"{key}.fsdp_config.param_offload": True} for key in models]
        heads, smallest = load_model_sizes(role.model).num_heads, role.rollout.tensor_model_parallel_size + 1
        parallel = [n for n in range(smallest, per_node + 1) if per_node % n == 0 and heads % n == 0]
        engines = [{f"{ROLLOUT}.tensor_model_parallel_size": size} for size in parallel]
    if device == "cuda":
        yield from (*engines, *({f"{section}optimizer_offload": True} for section in sections), *frozen)
    yield from ({budget: size} for size in _list_budgets(config, request) if size < MIN_TOKENS)
    if device == "cuda":
        yield from [{ENGINE_SHARE: "auto"}] * isinstance(config, Config)
        yield from ({f"{section}{key}": True} for key in offloads for section in sections)
    elif isinstance(config, Config):
        needed = count_kv_token_bytes(config) * config.data.max_length / GIB
        yield {f"{ROLLOUT}.kv_cache_gib": max(Rollout().kv_cache_gib, math.ceil(10 * needed) / 10)}


def _list_budgets(config: Config | TuningConfig, request: MemoryRequest | None) -> list[int]:
    """Return the token budget, half of it, a quarter, ... and last a rank's part of the longest row, if it is less."""
    if isinstance(config, Config):
        longest, parallel = config.data.max_length, config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    else:
        assert request is not None
        longest, parallel = request.longest_row * request.rows_per_example, config.ulysses_sequence_parallel_size
    budgets, smallest = [int(str(get_value(config, get_memory_keys(config)[0])))], -(-longest // parallel)
    while budgets[-1] > smallest:
        budgets.append(max(smallest, budgets[-1] // 2))
    return budgets


def get_max_tokens(budget: int | Literal["auto"]) -> int:
    """Return a token budget as configured or, if it is `auto`, the one with which the memory plan begins."""
    return MAX_TOKENS if budget == "auto" else budget


def replace_values(config: ConfigT, values: Settings) -> ConfigT:
    """Return the configuration with the values of dotted keys replaced, e.g. {"trainer.seed": 1}."""
    for key, value in values.items():
        config = replace_value(config, key, value)
    return config
