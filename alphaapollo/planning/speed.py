"""Estimate the time of an iteration from a roofline: matrix products, memory traffic, and traffic between ranks.

A GPU's speed is that of its data sheet; that of a CPU is measured. A range has answers of half to full length, and the
shares of EFFICIENCY of the device's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from alphaapollo.config.resolve import get_resolved
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import Machine, Placement
from alphaapollo.models.flops import find_gpu_speed
from alphaapollo.planning.engine_memory import count_kv_token_bytes
from alphaapollo.planning.memory_plan import MemoryPlan, find_micro_batch_shape, has_critic
from alphaapollo.planning.model_memory import estimate_layer_bytes, get_dtype_bytes, load_model_sizes

# Shares of the speed of products, and of memory and links, that a run reaches: (fast, slow).
EFFICIENCY: dict[Device, tuple[tuple[float, float], ...]] = {
    "cuda": ((0.7, 0.85), (0.4, 0.6)),
    "cpu": ((1.0, 1.0), (0.7, 0.7)),
}
NETWORK, HOST_LINK = 5e10, 2.5e10  # bytes/s between nodes (one 400 Gb/s adapter per node), and to host memory (PCIe)
ALL_REDUCE = 2e-5  # seconds of latency of a reduction among the ranks of an engine (assumed)
ENGINE_STEP = 4e-3  # seconds of an engine step without products and memory (assumed for GPUs)
SEQUENCE_STEP = 2e-5  # seconds of the engine's processes per sequence and step on a host of GPUs (assumed)
SEQUENCE_OPERATIONS = 1400  # the same on a CPU, in iterations of a Python loop (measured on two cores)
TRAJECTORY = 2.5e-4  # seconds of the driver per trajectory (scripts/bench/driver.py)
PUBLISH: dict[Device, float] = {"cuda": 2.0, "cpu": 0.2}  # seconds without traffic: probe, sleep and wake-up (assumed)
MEASURED_SECONDS = 0.2  # of each measurement
DRIVER_BYTES, CREDIT_BYTES = (
    50,
    60,
)  # per token of a batch, and with a critic or a KL in the reward (scale_simulated.md)
LOG_BYTES = 45  # per token in rollouts/ (measured)


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of a GPU or, on a CPU, of the threads of a rank or of an engine's process."""

    train_flops: float  # FLOP/s of products with the tokens of a micro-batch
    engine_flops: float  # FLOP/s of products with one token of each sequence
    bandwidth: float  # bytes/s of the memory
    link: float  # bytes/s between the ranks of a node
    sequence_step: float = SEQUENCE_STEP


@dataclass(frozen=True)
class IterationTime:
    """Estimated seconds of an iteration."""

    generate: float
    update: float
    publish: float  # weight sync, and the driver's work
    sampled_tokens: float
    overlaps: bool = False  # generation and updates run at the same time (async_mode=separate)

    @property
    def step(self) -> float:
        together = max(self.generate, self.update) if self.overlaps else self.generate + self.update
        return together + self.publish

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of generation, over all engines."""
        return self.sampled_tokens / self.generate


def count_answers_at_once(config: Config, memory: MemoryPlan, length: float) -> tuple[int, int]:
    """Return how many of an engine's answers of an iteration run at once, with rows of `length` tokens, and how many
    wait for them."""
    rollout = config.actor_rollout_ref.rollout
    answers = -(-config.trajectories_per_batch // (rollout.num_engines or 1))
    fit = int(memory.kv_cache_tokens // length) if memory.kv_cache_tokens else answers
    at_once = max(1, min(answers, get_resolved(rollout.max_num_seqs), fit))
    return at_once, answers - at_once


def find_device_speed(config: Config, placement: Placement, machine: Machine) -> DeviceSpeed | None:
    """Return the speed of a planned GPU, or of this machine; None if the GPU is unknown. On a CPU, measure products of
    the model's size, copies and Python's speed for less than a second."""
    if placement.device == "cuda":
        gpu = find_gpu_speed(machine.gpu_name)
        return DeviceSpeed(gpu.flops, gpu.flops, gpu.bandwidth, gpu.link) if gpu else None
    role, threads = config.actor_rollout_ref, torch.get_num_threads()
    width = load_model_sizes(role.model).hidden_size
    rows = min(4096, np.prod(find_micro_batch_shape(config))), min(512, get_resolved(role.rollout.max_num_seqs))
    flops = []
    try:
        for count, dtype, number in zip(
            rows, (role.model.dtype, role.rollout.dtype), (placement.threads, placement.engine_threads), strict=True
        ):
            torch.set_num_threads(number)
            left, right = (torch.ones(n, width, dtype=getattr(torch, dtype)) for n in (int(count), 3 * width))
            product = _measure_seconds(lambda left=left, right=right: torch.nn.functional.linear(left, right))
            flops.append(2 * left.numel() * len(right) / product)
        source, target = torch.zeros(2, 2**26, dtype=torch.uint8)
        bandwidth = 2 * source.numel() / _measure_seconds(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    operation = _measure_seconds(lambda: sum(index & 3 for index in range(10_000))) / 10_000
    return DeviceSpeed(flops[0], flops[1], bandwidth, bandwidth, SEQUENCE_OPERATIONS * operation)


def _measure_seconds(call: Callable[[], object]) -> float:
    call()
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < MEASURED_SECONDS:
        call()
        count += 1
    return seconds / count


def estimate_generation(
    config: Config, memory: MemoryPlan, speed: DeviceSpeed, prompt: float, response: float
) -> float:
    """Estimate the seconds in which an engine generates its part of a batch, with prompts and responses of these
    numbers of tokens. Experts are read as far as the batch uses them."""
    role, tp = config.actor_rollout_ref, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    sizes, rollout, width = load_model_sizes(role.model), role.rollout, get_dtype_bytes(role.rollout.dtype)
    active = sizes.flops.num_parameters if sizes.flops else sizes.parameters
    batch, waiting = count_answers_at_once(config, memory, prompt + response)
    read = width * min(sizes.parameters, active * batch) / tp
    read += batch * (prompt + response / 2) * count_kv_token_bytes(config)
    products = 2 * active / tp / speed.engine_flops  # of one token
    step = read / speed.bandwidth + batch * (products + speed.sequence_step) + ENGINE_STEP
    if tp > 1:
        step += 2 * sizes.num_layers * (ALL_REDUCE + 2 * batch * sizes.hidden_size * width / speed.link)
    prompts = (batch + waiting) / (config.group_size if rollout.enable_prefix_caching else 1)
    return response * (1 + waiting / batch) * step + prompts * prompt * products


def estimate_update(
    config: Config,
    memory: MemoryPlan,
    speed: DeviceSpeed,
    placement: Placement,
    prompt: float,
    response: float,
    num_passes: int,
) -> float:
    """Estimate the seconds of a rank for an iteration's passes and optimizer steps. num_passes: forward passes of the
    policy before its update."""
    actor, model, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.model, config.trainer
    sizes, rows, length = load_model_sizes(model), config.trajectories_per_update, prompt + response
    updates = actor.ppo_epochs + (config.critic.ppo_epochs if has_critic(config) else 0)
    passes = num_passes + memory.frozen_parameters / sizes.parameters + has_critic(config)  # forward
    passes += updates * (4 if model.enable_gradient_checkpointing is True else 3)
    products = 2.0 * sizes.parameters * rows * length
    if sizes.flops:
        products = sizes.flops.estimate_training_flops(np.full(rows, length)) / 3
    saved = rows * sizes.num_layers * estimate_layer_bytes(model, 1, int(length))
    compute = passes * (products / speed.train_flops + 2 * saved / speed.bandwidth) / placement.num_ranks
    micro_batch = int(np.prod(find_micro_batch_shape(config))) * placement.num_ranks
    link = speed.link if memory.shards <= trainer.n_gpus_per_node else min(speed.link, NETWORK)
    traffic = updates * max(config.num_mini_batches, rows * length / micro_batch) * memory.traffic_bytes / link
    state = 28 * sizes.parameters / memory.shards / speed.bandwidth  # weights, gradient and moments, read and written
    state += 2 * memory.offloaded_bytes / trainer.n_gpus_per_node / HOST_LINK
    return max(compute, traffic) + updates * config.num_mini_batches * state


def estimate_iteration(
    config: Config,
    memory: MemoryPlan,
    speed: DeviceSpeed,
    placement: Placement,
    prompt_length: float,
    num_passes: int,
) -> tuple[IterationTime, IterationTime]:
    """Estimate an iteration of a configuration in which `auto` is resolved: (fast, slow). prompt_length: tokens of a
    prompt. num_passes: as for estimate_update."""
    role, times = config.actor_rollout_ref, list[IterationTime]()
    weights = get_dtype_bytes(role.rollout.dtype) * load_model_sizes(role.model).parameters
    for share, (products, transfers) in zip((0.5, 1), EFFICIENCY[placement.device], strict=True):
        reached = DeviceSpeed(
            products * speed.train_flops,
            products * speed.engine_flops,
            transfers * speed.bandwidth,
            transfers * speed.link,
            speed.sequence_step,
        )
        response = share * config.data.max_response_length
        generate = estimate_generation(config, memory, reached, prompt_length, response)
        update = estimate_update(config, memory, reached, placement, prompt_length, response, num_passes)
        driver = TRAJECTORY * config.trajectories_per_batch + PUBLISH[placement.device]
        publish = weights * (6 / reached.bandwidth + 1 / reached.link) + driver
        tokens = response * config.trajectories_per_batch
        overlaps = config.trainer.async_mode == "separate" and config.trainer.max_staleness > 0
        times.append(IterationTime(generate, update, publish, tokens, overlaps))
    return times[0], times[1]
