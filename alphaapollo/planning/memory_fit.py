"""Fit a run to the memory of its device: choose the settings that are `auto`, and refuse a run that cannot fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from alphaapollo.config.keys import get_value, replace_value
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import Machine
from alphaapollo.models.load import load_config
from alphaapollo.planning.memory import GIB, load_model_sizes
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

ROLE, ACTOR = "actor_rollout_ref.", "actor_rollout_ref.actor."
CHECKPOINTING = f"{ROLE}model.enable_gradient_checkpointing"
BUDGET, ENGINE_SHARE = f"{ACTOR}ppo_max_token_len_per_gpu", f"{ROLLOUT}.gpu_memory_utilization"
MAX_TOKENS = 16384  # tokens of a micro-batch, if they fit
# Smallest micro-batches that cost less time than gradient checkpointing: without traffic, with traffic within a node of
# 450 GB/s per GPU (NVLink 4), and with traffic between nodes of 400 Gb/s.
MIN_TOKENS, MIN_TOKENS_IN_NODE, MIN_TOKENS_BETWEEN_NODES = 2048, 4096, MAX_TOKENS

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

    options = list_fast_settings(config, device, [*free, *(sizes if capacity else ())], request)
    fitting = next((settings for settings in options if not make_plan(settings).excess), None)
    if fitting is None:
        fitting = min(options, key=lambda settings: make_plan(settings).excess)
    config = replace_values(config, fitting)
    plan = make_plan({})
    shortage = plan.describe_shortage()
    problem, warning = ("", shortage) if plan.is_possible else (shortage, "")
    used, usable = plan.peak[1].total(), USABLE * capacity  # where checkpoints are copied before they are written
    if device == "cuda":
        used, usable = plan.offloaded_bytes, USABLE * host_memory
        problem = problem or _explain_missing_host_memory(config, plan, host_memory)
        if isinstance(config, Config):
            config = replace_value(config, ENGINE_SHARE, plan.engine_share)
    fits = not usable or used + plan.checkpoint_copy_bytes <= usable
    return config, replace(plan, problem=problem, warning=warning, saves_in_background=fits)


def fit_to_memory_if_measurable(
    config: ConfigT,
    device: Device,
    machine: Machine,
    is_gradient_checkpointing_auto: bool,
    request: MemoryRequest | None = None,
) -> tuple[ConfigT, MemoryPlan | None, list[str]]:
    """Do the same, and return notices, too. The plan is None if the sizes of the model cannot be read."""
    capacity = machine.memory if device == "cpu" else machine.gpu_memory
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


def get_memory_keys(config: Config | TuningConfig) -> list[str]:
    """Return the keys of token budget, gradient checkpointing, and ranks that share each trained model."""
    if not isinstance(config, Config):
        return ["data.max_token_len_per_gpu", CHECKPOINTING.removeprefix(ROLE), "fsdp_config.fsdp_size"]
    sections = [ACTOR, *["critic."] * has_critic(config)]
    return [BUDGET, CHECKPOINTING, *(f"{section}fsdp_config.fsdp_size" for section in sections)]


def list_fast_settings(
    config: Config | TuningConfig, device: Device, free: Collection[str], request: MemoryRequest | None = None
) -> list[Settings]:
    """List values of the `free` keys of `get_memory_keys`, the fastest first: a copy of the model on each node, then
    smaller micro-batches as long as they cost less time than gradient checkpointing, then gradient checkpointing."""
    budget, checkpointing, *sizes = get_memory_keys(config)
    ranks, per_node = config.trainer.num_ranks, config.trainer.n_gpus_per_node
    sizes = [key for key in sizes if key in free]
    shards = [get_trained_section(config).fsdp_config.count_shards(ranks)]
    if sizes:
        parts = [int(str(get_value(config, key.replace("fsdp_size", "ep_size")))) for key in sizes]
        shards = [per_node] * all(per_node % part == 0 for part in parts) + [ranks]
    budgets = _list_budgets(config, request) if budget in free else [0]
    is_open = checkpointing in free and not get_value(config, checkpointing)
    options: list[Settings] = []
    for count in shards:
        smallest = MIN_TOKENS_IN_NODE if count <= per_node else MIN_TOKENS_BETWEEN_NODES
        smallest = MIN_TOKENS if device == "cpu" or count == 1 else smallest
        for recomputes, fewest in ((False, smallest), (True, MIN_TOKENS))[not is_open :]:
            chosen = [tokens for tokens in budgets if tokens >= min(budgets[0], fewest)]
            values = [{**dict.fromkeys(sizes, count), checkpointing: recomputes, budget: tokens} for tokens in chosen]
            options += [{key: value for key, value in each.items() if key in free} for each in values]
    return options


def _list_budgets(config: Config | TuningConfig, request: MemoryRequest | None) -> list[int]:
    """Return the token budget, half of it, a quarter, ... and last a rank's part of the longest row, if it is less."""
    request = request or MemoryRequest(config.data.max_length)
    parallel = get_trained_section(config).ulysses_sequence_parallel_size
    smallest = -(-request.longest_row * request.rows_per_example // parallel)
    budgets = [int(str(get_value(config, get_memory_keys(config)[0])))]
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
