"""Fit a run to the memory of its device: choose the settings that are `auto`, and refuse a run that cannot fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from alphaapollo.config.check import find_unmet_requirements
from alphaapollo.config.keys import format_value, get_value, replace_value
from alphaapollo.config.requirements import CheckContext, find_conflicts
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import Machine
from alphaapollo.models.load import load_config
from alphaapollo.planning.engine_memory import count_kv_token_bytes
from alphaapollo.planning.memory_plan import (
    DEFAULT_ENGINE_SHARE,
    ROLLOUT,
    USABLE,
    MemoryPlan,
    MemoryRequest,
    get_trained_section,
    has_critic,
    plan_memory,
)
from alphaapollo.planning.model_memory import GIB, load_model_sizes

ROLE, ACTOR = "actor_rollout_ref.", "actor_rollout_ref.actor."
CHECKPOINTING = f"{ROLE}model.enable_gradient_checkpointing"
BUDGET, ENGINE_SHARE = f"{ACTOR}ppo_max_token_len_per_gpu", f"{ROLLOUT}.gpu_memory_utilization"
MAX_TOKENS = 16384  # tokens of a micro-batch, if they fit
# Smallest micro-batches that cost less time than gradient checkpointing: without traffic, with traffic within a node of
# 450 GB/s per GPU (NVLink 4), and with traffic between nodes of 400 Gb/s.
MIN_TOKENS, MIN_TOKENS_IN_NODE, MIN_TOKENS_BETWEEN_NODES = 2048, 4096, MAX_TOKENS
MORE_NODES = (2, 4, 8, 16)  # factors that are tried for trainer.nnodes

ConfigT = TypeVar("ConfigT", bound=Config | TuningConfig)
Settings = Mapping[str, object]  # {key: value}


def fit_to_memory(
    config: ConfigT,
    device: Device,
    capacity: int,
    is_gradient_checkpointing_auto: bool,
    host_memory: int = 0,
    request: MemoryRequest | None = None,
    num_gpus: int = 0,
    resolve: Callable[[Settings], ConfigT] | None = None,
) -> tuple[ConfigT, MemoryPlan]:
    """Plan the memory of a run, and choose gradient checkpointing, the token budget, the ranks that share a model on
    several nodes, and the engines' share of a GPU, where they are `auto`. Returns the configuration and the plan. If
    the run cannot fit, `problem` of the plan says why, and names keys whose own plan fits.

    capacity: as for plan_memory. host_memory: bytes of host memory of a GPU node; 0: unknown. request: for fine-tuning.
    num_gpus: GPUs of a node; 0: unknown. resolve: function that returns `config` as it is with further keys; None:
    these keys change no other value.
    """

    def choose(config: ConfigT, settings: Settings) -> tuple[ConfigT, MemoryPlan]:
        is_auto = is_gradient_checkpointing_auto and get_memory_keys(config)[1] not in settings
        return _choose_settings(config, device, capacity, is_auto, request)

    def list_errors(config: Config | TuningConfig) -> set[str]:
        return {*find_conflicts(CheckContext(config, device, num_gpus)), *find_unmet_requirements(config)}

    config, plan = choose(config, {})
    shortage = plan.describe_shortage()
    if shortage:

        def is_acceptable(settings: Settings) -> bool:
            changed, changed_plan = choose(resolve(settings) if resolve else replace_values(config, settings), settings)
            missing = _explain_missing_host_memory(changed, changed_plan, host_memory)
            return not (changed_plan.describe_shortage() or missing or list_errors(changed) - known_errors)

        known_errors = list_errors(config)  # that no settings avoid, e.g. because the machine is not known
        shortage += f" {suggest_settings(config, device, num_gpus, is_acceptable)}"
    problem, warning = ("", shortage) if plan.is_possible else (shortage, "")
    used, usable = plan.peak[1].total(), USABLE * capacity  # of the memory to which checkpoints are copied
    if device == "cuda":
        used, usable = plan.host_bytes, USABLE * host_memory
        problem = problem or _explain_missing_host_memory(config, plan, host_memory)
        if isinstance(config, Config):
            config = replace_value(config, ENGINE_SHARE, plan.engine_share)
    copies_fit = not usable or used + plan.checkpoint_copy_bytes <= usable
    return config, replace(plan, problem=problem, warning=warning, saves_in_background=copies_fit)


def _choose_settings(
    config: ConfigT, device: Device, capacity: int, is_gradient_checkpointing_auto: bool, request: MemoryRequest | None
) -> tuple[ConfigT, MemoryPlan]:
    """Return the configuration with the fastest values that fit, or that are nearest to it, where they are `auto`, and
    its plan. Arguments as for fit_to_memory."""
    budget_key, checkpointing_key, *size_keys = get_memory_keys(config)
    auto_keys = {checkpointing_key} if is_gradient_checkpointing_auto else set()
    if get_value(config, budget_key) == "auto":
        auto_keys.add(budget_key)
        config = replace_value(config, budget_key, MAX_TOKENS)
    has_several_nodes = device == "cuda" and config.trainer.nnodes > 1
    size_keys = [key for key in size_keys if has_several_nodes and get_value(config, key) == -1]
    config = replace_values(config, dict.fromkeys(size_keys, config.trainer.num_ranks))
    options = list_fast_settings(config, device, [*auto_keys, *(size_keys if capacity else ())], request)
    changed = [replace_values(config, settings) for settings in options]
    plans = ((one, plan_memory(one, device, capacity, request)) for one in changed)
    return min(plans, key=lambda item: item[1].excess)  # the first one that fits


def fit_to_memory_if_measurable(
    config: ConfigT,
    device: Device,
    machine: Machine,
    is_gradient_checkpointing_auto: bool,
    request: MemoryRequest | None = None,
    resolve: Callable[[Settings], ConfigT] | None = None,
) -> tuple[ConfigT, MemoryPlan | None, list[str]]:
    """Call fit_to_memory, and also return notices. The plan is None if the sizes of the model cannot be read."""
    capacity = machine.memory if device == "cpu" else machine.gpu_memory
    checkpointing, host = is_gradient_checkpointing_auto, machine.memory
    try:
        fitted, plan = fit_to_memory(config, device, capacity, checkpointing, host, request, machine.num_gpus, resolve)
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:  # from modeling code of any kind
        failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.!')}"
        if isinstance(config, Config) and config.actor_rollout_ref.rollout.gpu_memory_utilization == "auto":
            config = replace_value(config, ENGINE_SHARE, DEFAULT_ENGINE_SHARE)
        return config, None, [f"memory is not planned, because the sizes of the model cannot be read ({failure})."]
    return fitted, plan, ([plan.warning] if plan.warning else [])


def _explain_missing_host_memory(config: Config | TuningConfig, plan: MemoryPlan, host_memory: int) -> str:
    """Return why the host memory of a GPU node is too small, or "" if it may be enough. Rank 0 loads the model in the
    dtype of its files."""
    model = config.actor_rollout_ref.model if isinstance(config, Config) else config.model
    width = (load_config(model).dtype or torch.float32).itemsize
    loaded = load_model_sizes(model).count_bytes(width)
    offload = "Unset some of the offload keys (activation_offload, and those of fsdp_config), or raise trainer.nnodes"
    load = "Use nodes with more memory" + (", or save the model in bfloat16" if width > 2 else "")
    for purpose, size, fix in (("offloading", plan.host_bytes, offload), ("loading the model", loaded, load)):
        if 0 < host_memory < size:
            needed = f"{size / GIB:.0f} GiB of host memory per node, but a node has {host_memory / GIB:.0f} GiB"
            return f"memory: {purpose} needs {needed}. {fix}."
    return ""


def get_memory_keys(config: Config | TuningConfig) -> list[str]:
    """Return the keys of token budget, gradient checkpointing, and ranks that share each trained model."""
    if not isinstance(config, Config):
        return ["data.max_token_len_per_gpu", CHECKPOINTING.removeprefix(ROLE), "fsdp_config.fsdp_size"]
    sections = [ACTOR, "critic."] if has_critic(config) else [ACTOR]
    return [BUDGET, CHECKPOINTING, *(f"{section}fsdp_config.fsdp_size" for section in sections)]


def list_fast_settings(
    config: Config | TuningConfig, device: Device, free: Collection[str], request: MemoryRequest | None = None
) -> list[Settings]:
    """List values of the `free` keys of `get_memory_keys`, the fastest first: a copy of the model on each node, then
    smaller micro-batches as long as they cost less time than gradient checkpointing, then gradient checkpointing:
    selective, which repeats no product, then that of every layer."""
    budget_key, checkpointing_key, *size_keys = get_memory_keys(config)
    ranks, per_node = config.trainer.num_ranks, config.trainer.n_gpus_per_node
    size_keys = [key for key in size_keys if key in free]
    shards = [get_trained_section(config).fsdp_config.count_shards(ranks)]
    if size_keys:
        ep_sizes = [int(str(get_value(config, key.replace("fsdp_size", "ep_size")))) for key in size_keys]
        shards = [per_node, ranks] if all(per_node % ep_size == 0 for ep_size in ep_sizes) else [ranks]
    budgets = _list_budgets(config, request) if budget_key in free else [0]
    choices = _list_checkpointing(config, checkpointing_key) if checkpointing_key in free else [None]
    options: list[Settings] = []
    for count in shards:
        smallest = MIN_TOKENS_IN_NODE if count <= per_node else MIN_TOKENS_BETWEEN_NODES
        smallest = MIN_TOKENS if device == "cpu" or count == 1 else smallest
        for checkpointing in choices:
            fewest = MIN_TOKENS if checkpointing is choices[-1] else smallest
            large_budgets = [tokens for tokens in budgets if tokens >= min(budgets[0], fewest)]
            common = {**dict.fromkeys(size_keys, count), checkpointing_key: checkpointing}
            all_keys = [{**common, budget_key: tokens} for tokens in large_budgets]
            options += [{key: value for key, value in settings.items() if key in free} for settings in all_keys]
    return options


def _list_checkpointing(config: Config | TuningConfig, key: str) -> list[object]:
    """Return the value of enable_gradient_checkpointing, and those that save more memory in more time."""
    value, compiles = get_value(config, key), get_value(config, f"{key.rpartition('.')[0]}.use_torch_compile")
    more = [] if value or compiles else ["selective"]
    return [True] if value is True else [value, *more, True]


def _list_budgets(config: Config | TuningConfig, request: MemoryRequest | None) -> list[int]:
    """Return the token budget, its half, its quarter, ..., down to a rank's part of the longest row, if it is less."""
    request = request or MemoryRequest(config.data.max_length)
    parallel = get_trained_section(config).ulysses_sequence_parallel_size
    smallest = -(-request.longest_row * request.rows_per_example // parallel)
    budgets = [int(str(get_value(config, get_memory_keys(config)[0])))]
    while budgets[-1] > smallest:
        budgets.append(max(smallest, budgets[-1] // 2))
    return budgets


def list_memory_saving_settings(
    config: Config | TuningConfig, device: Device, num_gpus: int, adds_devices: bool = True
) -> Iterator[Settings]:
    """Yield settings that save memory, each to be applied together with all earlier ones. The cheapest come first.
    num_gpus: GPUs of a node; 0: unknown. adds_devices: yield more GPUs and nodes instead of the slow offload_policy."""
    budget_key, checkpointing_key, *size_keys = get_memory_keys(config)
    trainer, sections = config.trainer, [key.removesuffix("fsdp_size") for key in size_keys]
    yield from list_fast_settings(config, device, (budget_key, checkpointing_key))
    if device == "cpu" and isinstance(config, Config):
        sequence_bytes = config.data.max_length * count_kv_token_bytes(config)
        yield {f"{ROLLOUT}.kv_cache_gib": math.ceil(10 * sequence_bytes / GIB) / 10}
    elif isinstance(config, Config):
        yield {ENGINE_SHARE: "auto"}
        yield {f"{ROLLOUT}.free_cache_engine": True}
        yield from _list_engine_sizes(config, trainer.n_gpus_per_node)
    if device == "cuda":
        yield {f"{section}optimizer_offload": True for section in sections}
        if isinstance(config, Config):
            sections += [f"{ROLE}ref.fsdp_config."] if config.needs_reference else []
            yield {f"{section}param_offload": True for section in sections}
        yield {checkpointing_key.replace("enable_gradient_checkpointing", "activation_offload"): True}
        if not adds_devices:
            yield {f"{section}offload_policy": True for section in sections}
    yield dict.fromkeys(size_keys, -1)
    if adds_devices and device == "cuda":
        for count in (2, 4, 8):
            if trainer.n_gpus_per_node < count <= num_gpus:
                yield {"trainer.n_gpus_per_node": count}
                yield from _list_engine_sizes(config, count)
    if adds_devices:
        yield from ({"trainer.nnodes": trainer.nnodes * factor} for factor in MORE_NODES)


def _list_engine_sizes(config: Config | TuningConfig, num_gpus: int) -> Iterator[Settings]:
    """Yield larger sizes of tensor-parallel engines that `num_gpus` GPUs of a node and the model's heads allow."""
    if isinstance(config, Config) and (rollout := config.actor_rollout_ref.rollout).has_engine_process:
        heads = load_model_sizes(config.actor_rollout_ref.model).num_heads
        for size in range(rollout.tensor_model_parallel_size + 1, num_gpus + 1):
            if num_gpus % size == 0 and heads % size == 0 and rollout.lora == "merged":
                yield {f"{ROLLOUT}.tensor_model_parallel_size": size}


def find_cheapest_settings(options: Iterable[Settings], is_acceptable: Callable[[Settings], bool]) -> Settings | None:
    """Combine the first of the `options` until they are acceptable together, and return those of their settings that
    are needed. None: even all options together are not acceptable."""
    settings: dict[str, object] = {}
    for option in options:
        settings |= option
        if is_acceptable(settings):
            break
    else:
        return None
    for key in reversed(list(settings)):
        fewer = {other: value for other, value in settings.items() if other != key}
        settings = fewer if is_acceptable(fewer) else settings
    return settings


def suggest_settings(
    config: Config | TuningConfig, device: Device, num_gpus: int, is_acceptable: Callable[[Settings], bool]
) -> str:
    """Describe the cheapest settings with which a run fits. If these are slow, or there are none, also describe
    settings with more devices, and settings with LoRA."""
    lora_key = get_memory_keys(config)[1].replace("enable_gradient_checkpointing", "lora_rank")
    options = [*list_memory_saving_settings(config, device, num_gpus, adds_devices=False)]
    found = [cheapest := find_cheapest_settings(options, is_acceptable)]
    if not cheapest or any(key.endswith("offload_policy") for key in cheapest):
        found.append(find_cheapest_settings(list_memory_saving_settings(config, device, num_gpus), is_acceptable))
        if not get_value(config, lora_key):
            found.append(find_cheapest_settings([{lora_key: 32}, *options], is_acceptable))
    texts = [", ".join(f"{key}={format_value(value)}" for key, value in keys.items()) for keys in found if keys]
    if texts:
        return f"It fits with {'; or with '.join(texts)} (docs/scaling.md)."
    means = "Smaller micro-batches" + (", offloading, tensor parallelism" if device == "cuda" else "")
    tried = f"{means} and {MORE_NODES[-1] * config.trainer.nnodes} nodes are not enough"
    hint = " To plan for GPUs, set trainer.planned_device, e.g. h100." * (config.trainer.dry_run and device == "cpu")
    return f"{tried}. Use a smaller model, or devices with more memory.{hint}"


def get_max_tokens(budget: int | Literal["auto"]) -> int:
    """Return the configured token budget or, if it is `auto`, the budget with which the memory plan begins."""
    return MAX_TOKENS if budget == "auto" else budget


def replace_values(config: ConfigT, values: Settings) -> ConfigT:
    """Return the configuration with the values of dotted keys replaced, e.g. {"trainer.seed": 1}."""
    for key, value in values.items():
        config = replace_value(config, key, value)
    return config
