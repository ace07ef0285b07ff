"""Fit a run to the memory of its device: choose the settings that are `auto`, and suggest settings that save memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from alphaapollo.config.keys import format_value, get_value, replace_value
from alphaapollo.config.schema import Config, Model, Rollout, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import Machine
from alphaapollo.planning.memory import GIB, Usage, count_loading_bytes, load_model_sizes
from alphaapollo.planning.memory_plan import (
    DEFAULT_ENGINE_SHARE,
    USABLE,
    MemoryPlan,
    MemoryRequest,
    count_kv_token_bytes,
    has_critic,
    plan_memory,
)

ROLE, ACTOR, ROLLOUT = "actor_rollout_ref.", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CHECKPOINTING = f"{ROLE}model.enable_gradient_checkpointing"
BUDGET, ENGINE_SHARE = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.gpu_memory_utilization"
DEFAULT_CACHE = Rollout().kv_cache_gib
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
    """Plan the memory of a run, and choose gradient checkpointing, the token budget and the engines' share of a GPU
    where they are `auto`. Returns the configuration and the plan, with a `problem` if the run cannot fit.

    capacity: as for plan_memory. host_memory: bytes of host memory of a GPU node; 0: unknown. request: of fine-tuning.
    """
    budget, checkpointing = get_memory_keys(config)
    free = {checkpointing} if is_gradient_checkpointing_auto else set()
    if get_value(config, budget) == "auto":
        free.add(budget)
        config = replace_value(config, budget, MAX_TOKENS)

    def make_plan(one: ConfigT) -> MemoryPlan:
        return plan_memory(one, device, capacity, request)

    all_options = list_memory_saving_settings(config, device, request)
    options = ({key: value for key, value in option.items() if key in free} for option in all_options)
    settings, _ = find_cheapest_settings(config, make_plan, options, lambda plan: plan.has_headroom_in_update)
    config = replace_values(config, settings)
    plan = make_plan(config)

    def suggest_settings() -> str:
        settings, found = find_cheapest_settings(
            config,
            make_plan,
            list_memory_saving_settings(config, device, request),
            lambda plan: plan.has_headroom and (not host_memory or plan.offloaded_bytes <= host_memory),
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
    if isinstance(config, Config) and device == "cuda":
        config = replace_value(config, ENGINE_SHARE, plan.engine_share)
    if device == "cuda":
        model = config.actor_rollout_ref.model if isinstance(config, Config) else config.model
        problem = plan.problem or _explain_missing_host_memory(model, plan, host_memory)
        fits = not host_memory or plan.offloaded_bytes + plan.checkpoint_copy_bytes <= USABLE * host_memory
        return config, replace(plan, problem=problem, saves_in_background=fits)
    copies = Usage({"checkpoint copy": plan.checkpoint_copy_bytes})
    with_copies = replace(plan, phases={name: usage + copies for name, usage in plan.phases.items()})
    return config, with_copies if with_copies.has_headroom else replace(plan, saves_in_background=False)


def fit_to_memory_if_measurable(
    config: ConfigT,
    device: Device,
    machine: Machine,
    is_gradient_checkpointing_auto: bool,
    request: MemoryRequest | None = None,
) -> tuple[ConfigT, MemoryPlan | None, list[str]]:
    """Do the same, and return notices, too. The plan is None if the model's code fails on the meta device."""
    capacity = machine.get_training_memory(device)
    try:
        fitted, plan = fit_to_memory(config, device, capacity, is_gradient_checkpointing_auto, machine.memory, request)
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:  # from code that needs data
        failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.!')}"
        notice = f"the memory of the model is not planned, because it cannot run on the meta device ({failure})."
        if isinstance(config, Config) and config.actor_rollout_ref.rollout.gpu_memory_utilization == "auto":
            config = replace_value(config, ENGINE_SHARE, DEFAULT_ENGINE_SHARE)
        return config, None, [notice + " Gradient checkpointing stays off." * is_gradient_checkpointing_auto]
    return fitted, plan, [plan.warning] if plan.warning else []


def _explain_missing_host_memory(model: Model, plan: MemoryPlan, host_memory: int) -> str:
    """Return why the host memory of a GPU node is too small, or "" if it may be enough."""
    offload = "Unset some of the offload keys of fsdp_config, or raise trainer.nnodes"
    needs = {
        "offloading": (plan.offloaded_bytes, offload),
        "loading the model": (count_loading_bytes(model), "Use nodes with more memory, or save the model in bfloat16"),
    }
    for purpose, (size, fix) in needs.items():
        if 0 < host_memory < size:
            needed = f"{size / GIB:.0f} GiB of host memory per node, but a node has {host_memory / GIB:.0f} GiB"
            return f"memory: {purpose} needs {needed}. {fix}."
    return ""


def find_cheapest_settings(
    config: ConfigT,
    make_plan: Callable[[ConfigT], MemoryPlan],
    options: Iterator[Settings],
    is_acceptable: Callable[[MemoryPlan], bool],
) -> tuple[Settings, bool]:
    """Return the settings that cost the least time among those whose memory plan satisfies `is_acceptable`, and True;
    or those that save the most memory, and False, if no settings do. options: each in addition to those before it."""

    def is_acceptable_with(settings: Settings) -> bool:
        return is_acceptable(make_plan(replace_values(config, settings)))

    settings: dict[str, object] = {}
    while not is_acceptable_with(settings):
        option = next(options, None)
        if option is None:
            return settings, False
        settings |= option
    for key in reversed(list(settings)):
        fewer = {other: value for other, value in settings.items() if other != key}
        settings = fewer if is_acceptable_with(fewer) else settings
    return settings, True


def get_memory_keys(config: Config | TuningConfig) -> tuple[str, str]:
    """Return the keys of the token budget and of gradient checkpointing."""
    if isinstance(config, Config):
        return BUDGET, CHECKPOINTING
    return "data.max_token_len_per_gpu", CHECKPOINTING.removeprefix(ROLE)


def list_memory_saving_settings(
    config: Config | TuningConfig, device: Device, request: MemoryRequest | None = None
) -> Iterator[Settings]:
    """Yield settings that save memory, each in addition to those before it. Those that cost the least time come first:
    smaller micro-batches, gradient checkpointing, offloading."""
    (budget_key, checkpointing), sections = get_memory_keys(config), ["fsdp_config"]
    budget = int(str(get_value(config, budget_key)))
    if isinstance(config, Config):
        longest, parallel = config.data.max_length, config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        sections = [f"{section}.fsdp_config" for section in [ACTOR, *["critic"] * has_critic(config)]]
    else:
        assert request is not None
        longest, parallel = request.longest_row * request.rows_per_example, config.ulysses_sequence_parallel_size
    longest = -(-longest // parallel)
    smaller = [{budget_key: size} for size in halve(budget, max(longest, MIN_TOKENS))]
    yield from smaller
    if not get_value(config, checkpointing):
        yield {checkpointing: True, budget_key: budget}
        yield from smaller
    if device == "cuda":
        if isinstance(config, Config):
            heads = load_model_sizes(config.actor_rollout_ref.model).num_heads
            for size in range(
                config.actor_rollout_ref.rollout.tensor_model_parallel_size + 1, config.trainer.n_gpus_per_node + 1
            ):
                if config.trainer.n_gpus_per_node % size == 0 and heads % size == 0:
                    yield {f"{ROLLOUT}.tensor_model_parallel_size": size}
        yield from ({f"{section}.optimizer_offload": True} for section in sections)
    if isinstance(config, Config) and device == "cuda":
        frozen = ["actor_rollout_ref.ref"] * config.needs_reference + list(config.teacher.local_models)
        yield from ({f"{key}.fsdp_config.param_offload": True} for key in frozen)
    yield from ({budget_key: size} for size in halve(min(budget, MIN_TOKENS), longest))
    if isinstance(config, Config):
        if device == "cpu":
            needed = count_kv_token_bytes(config) * config.data.max_length / GIB
            yield {f"{ROLLOUT}.kv_cache_gib": max(DEFAULT_CACHE, math.ceil(10 * needed) / 10)}
        elif config.actor_rollout_ref.rollout.gpu_memory_utilization != "auto":
            yield {ENGINE_SHARE: "auto"}
    if device == "cuda":
        offload = ("param_offload", "offload_policy") if isinstance(config, Config) else ("offload_policy",)
        yield from ({f"{section}.{key}": True} for key in offload for section in sections)


def get_max_tokens(budget: int | Literal["auto"]) -> int:
    """Return a token budget as configured or, if it is `auto`, the one with which the memory plan begins."""
    return MAX_TOKENS if budget == "auto" else budget


def halve(budget: int, smallest: int) -> Iterator[int]:
    """Yield budget / 2, budget / 4, ..., and last `smallest`, if it is less than the budget."""
    while budget > smallest:
        budget = max(smallest, budget // 2)
        yield budget


def replace_values(config: ConfigT, values: Settings) -> ConfigT:
    """Return the configuration with the values of dotted keys replaced, e.g. {"trainer.seed": 1}."""
    for key, value in values.items():
        config = replace_value(config, key, value)
    return config
