"""Estimate the time of an iteration from a roofline: matrix products, memory traffic, and traffic between ranks.

A GPU's speed is that of its data sheet; that of a CPU is measured. A range has answers of half and of full length, and
the shares of EFFICIENCY of the device's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from alphaapollo.config.keys import replace_value
from alphaapollo.config.resolve import get_resolved
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.planned_device import find_gpu
from alphaapollo.controller.placement import Machine, Placement
from alphaapollo.models.flops import FlopsEstimator
from alphaapollo.planning.engine_memory import count_kv_token_bytes
from alphaapollo.planning.memory_plan import MemoryPlan, find_micro_batch_shape, has_critic
from alphaapollo.planning.model_memory import (
    count_adapter_parameters,
    count_recomputed_layers,
    estimate_layer_bytes,
    get_dtype_bytes,
    load_model_sizes,
)

# Shares that a run reaches of each value of DeviceSpeed: (fast, slow); assumed for GPUs.
EFFICIENCY: dict[Device, tuple[tuple[float, ...], ...]] = {
    "cuda": ((0.7, 0.7, 0.85, 0.85, 1.0), (0.4, 0.4, 0.6, 0.6, 1.0)),
    "cpu": ((1.0,) * 5, (0.8, 0.8, 0.8, 0.8, 1.0)),
}
NETWORK, HOST_LINK = 5e10, 2.5e10  # bytes/s between nodes (one 400 Gb/s adapter per node), and to host memory (PCIe)
ENGINE_STEP, ALL_REDUCE = 4e-3, 2e-5  # seconds of an engine's step, and of a reduction, besides traffic (assumed)
SEQUENCE_STEP = 2e-5  # seconds of an engine's processes per sequence and step on a host of GPUs (assumed)
SEQUENCE_OPERATIONS = 2400  # the same on a CPU, in iterations of a Python loop (measured with vLLM on two cores)
TRAJECTORY = 2.5e-4  # seconds of the driver per trajectory (scripts/bench/driver.py)
PUBLISH: dict[Device, float] = {"cuda": 2.0, "cpu": 0.2}  # seconds of a weight sync besides traffic (assumed for GPUs)
MEASURED_SECONDS = 0.04  # of each measurement, of which every start has four


class DeviceSpeed(NamedTuple):
    """Speed of a GPU or, on a CPU, of the threads of a rank or engine."""

    train_flops: float  # FLOP/s of products with the tokens of a micro-batch
    engine_flops: float  # FLOP/s of products with one token of each sequence
    bandwidth: float  # bytes/s of the memory
    link: float  # bytes/s between the ranks of a node
    sequence_step: float = SEQUENCE_STEP


class IterationTime(NamedTuple):
    """Estimated seconds of an iteration, and its tokens."""

    step: float
    generate: float
    update: float
    recompute: float  # part of the update, by enable_gradient_checkpointing and activation_offload
    tokens_per_second: float  # sampled tokens per second of generation, by all engines
    tokens: float  # of all rows, with their prompts


def count_answers_at_once(config: Config, memory: MemoryPlan, length: float) -> tuple[int, int]:
    """Return how many rows of `length` tokens an engine generates at once, and how many of an iteration wait."""
    rollout = config.actor_rollout_ref.rollout
    rows = -(-config.trajectories_per_batch // (rollout.num_engines or 1))
    fit = int(memory.kv_cache_tokens // length) if memory.kv_cache_tokens else rows
    at_once = min(rows, get_resolved(rollout.max_num_seqs), fit)
    return at_once, rows - at_once


def find_device_speed(config: Config, placement: Placement, machine: Machine) -> DeviceSpeed | None:
    """Return the speed of a planned GPU, or of this machine; None if the GPU is unknown. On a CPU, measure products of
    the model's size, copies and a Python loop for less than a second."""
    if placement.device == "cuda":
        gpu = find_gpu(machine.gpu_name)
        peak = 1e12 * gpu.tflops if gpu else 0.0
        return DeviceSpeed(peak, peak, 1e9 * gpu.bandwidth, 1e9 * gpu.link) if gpu else None
    role, threads = config.actor_rollout_ref, torch.get_num_threads()
    width, limit = load_model_sizes(role.model).hidden_size, min(512, get_resolved(role.rollout.max_num_seqs))
    sizes = (min(4096, int(np.prod(find_micro_batch_shape(config)))), role.model.dtype), (limit, role.rollout.dtype)
    flops = list[float]()
    torch.set_num_threads(placement.threads)
    try:
        for rows, dtype in sizes:
            left, right = (torch.ones(count, width, dtype=getattr(torch, dtype)) for count in (rows, 3 * width))
            flops.append(6 * rows * width**2 / _measure_seconds(partial(torch.nn.functional.linear, left, right)))
        source, target = torch.zeros(2, 2**25, dtype=torch.uint8)
        bandwidth = 2 * source.numel() / _measure_seconds(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    loop = _measure_seconds(lambda: sum(index & 3 for index in range(SEQUENCE_OPERATIONS)))
    return DeviceSpeed(flops[0], flops[1], bandwidth, bandwidth, loop)


def _measure_seconds(call: Callable[[], object]) -> float:
    call()
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < MEASURED_SECONDS:
        call()
        count += 1
    return seconds / count


@dataclass(frozen=True)
class IterationEstimator:
    """Estimator of an iteration of a configuration in which `auto` is resolved."""

    config: Config
    memory: MemoryPlan
    placement: Placement
    prompt: float  # tokens of a prompt
    num_passes: int  # forward passes of the policy, besides those of its update
    trained_share: float  # least share of rows with a gradient

    def estimate(self, speed: DeviceSpeed) -> tuple[IterationTime, IterationTime]:
        """Estimate (fast, slow)."""
        config, device, times = self.config, self.placement.device, list[IterationTime]()
        count, role = config.trajectories_per_batch, config.actor_rollout_ref
        weights = get_dtype_bytes(role.rollout.dtype) * load_model_sizes(role.model).parameters
        runs_ahead = config.trainer.async_mode == "separate" and config.engine_staleness > 0
        for share, trained, shares in zip((0.5, 1.0), (self.trained_share, 1.0), EFFICIENCY[device], strict=True):
            reached = DeviceSpeed(*(part * value for part, value in zip(shares, speed, strict=True)))
            response = share * config.data.max_response_length
            generate = self.estimate_generation(reached, response)
            update = self.estimate_update(reached, response, trained)
            recompute = update - self.without_recomputation.estimate_update(reached, response, trained)
            step = max(generate, update) if runs_ahead else generate + update
            step += weights * (6 / reached.bandwidth + 1 / reached.link) + TRAJECTORY * count + PUBLISH[device]
            sampled = response * count / generate
            times.append(IterationTime(step, generate, update, recompute, sampled, count * (response + self.prompt)))
        return times[0], times[1]

    @property
    def without_recomputation(self) -> IterationEstimator:
        keeps_all = {"enable_gradient_checkpointing": False, "activation_offload": False}
        model = self.config.actor_rollout_ref.model.model_copy(update=keeps_all)
        config = replace_value(self.config, "actor_rollout_ref.model", model)
        return replace(self, config=config, memory=replace(self.memory, offloaded_activations=0))

    def estimate_generation(self, speed: DeviceSpeed, response: float) -> float:
        """Estimate the seconds in which an engine generates its part of a batch. It reads the experts in use."""
        role, tp = self.config.actor_rollout_ref, self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        sizes, width = load_model_sizes(role.model), get_dtype_bytes(role.rollout.dtype)
        active = sizes.flops.num_parameters if sizes.flops else sizes.parameters
        at_once, waiting = count_answers_at_once(self.config, self.memory, self.prompt + response)
        rows, total = max(1, at_once), at_once + waiting
        read = min(sizes.count_bytes(width), width * active * rows) / tp
        read += rows * (self.prompt + response / 2) * count_kv_token_bytes(self.config)
        product = 2 * active / tp / speed.engine_flops  # seconds of a token
        step = read / speed.bandwidth + rows * (product + speed.sequence_step) + ENGINE_STEP
        if tp > 1:
            step += 2 * sizes.num_layers * (ALL_REDUCE + 2 * rows * sizes.hidden_size * width / speed.link)
        prompts = total / (self.config.group_size if role.rollout.enable_prefix_caching else 1)
        return response * total / rows * step + prompts * self.prompt * product

    def estimate_update(self, speed: DeviceSpeed, response: float, trained_share: float) -> float:
        """Estimate the seconds of a rank for an iteration's passes and optimizer steps."""
        config, memory, model = self.config, self.memory, self.config.actor_rollout_ref.model
        sizes, rows, length = load_model_sizes(model), config.trajectories_per_update, self.prompt + response
        updates = config.actor_rollout_ref.actor.ppo_epochs * trained_share
        updates += config.critic.ppo_epochs if has_critic(config) else 0
        passes = self.num_passes + memory.frozen_parameters / sizes.parameters + has_critic(config)  # forward
        trained, backward = count_adapter_parameters(model) or sizes.parameters, 1 if model.lora_rank else 2
        repeated = updates * count_recomputed_layers(model) / sizes.num_layers
        passes += updates * (1 + backward)
        products = passes + repeated * (not model.keeps_products)
        estimator = sizes.flops or FlopsEstimator(sizes.parameters, sizes.parameters, 0, 0)
        flops = estimator.estimate_training_flops(np.full(rows, length)) / 3
        saved = rows * sizes.num_layers * estimate_layer_bytes(model, 1, int(length))
        ranks, ranks_per_node = self.placement.num_ranks, self.placement.ranks_per_node
        compute = products * flops / speed.train_flops + (passes + repeated) * 2 * saved / speed.bandwidth
        inputs = repeated * sizes.num_layers * rows * length * sizes.hidden_size * get_dtype_bytes(model.dtype)
        offload = 2 * inputs / HOST_LINK if memory.offloaded_activations else 0.0
        micro_batches = rows * length / ranks / np.prod(find_micro_batch_shape(config))
        link = speed.link if memory.shards <= ranks_per_node else min(speed.link, NETWORK)
        traffic = updates * max(config.num_mini_batches, float(micro_batches)) * memory.traffic_bytes / link
        step = 28 * trained / memory.shards / speed.bandwidth  # weights, gradient, moments: read, written
        step += 2 * memory.offloaded_bytes / ranks_per_node / HOST_LINK
        return max(compute / ranks, offload / ranks, traffic) + updates * config.num_mini_batches * step
