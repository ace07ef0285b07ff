"""Time of an iteration: hand-computed rooflines, and the measured speed of a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from alphaapollo.config.schema.planned_device import GPUS, find_gpu
from alphaapollo.controller.placement import Machine, Placement, query_smallest_gpu
from alphaapollo.planning import speed
from alphaapollo.planning.memory_plan import plan_memory
from alphaapollo.planning.model_memory import GIB, load_model_sizes
from alphaapollo.planning.plan_table import format_range
from alphaapollo.planning.speed import DeviceSpeed, IterationEstimator, count_answers_at_once, find_device_speed
from tests.unit.planning.test_memory import TOKENS, resolved

SLOW_MEMORY = DeviceSpeed(1e30, 1e30, 1e9, 1e30, 0.0)  # 1 GB/s; everything else takes no time


def estimator(gpus: int = 8, **keys: object) -> IterationEstimator:
    sizes = {"actor_rollout_ref.rollout.max_num_seqs": 1024, "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5}
    config = resolved("qwen2.5-0.5b", gpus, {**sizes, **{key.replace("__", "."): value for key, value in keys.items()}})
    placement = Placement(device="cuda", ranks_per_node=gpus, num_engines=gpus)
    return IterationEstimator(config, plan_memory(config, "cuda", 80 * GIB), placement, 1024, 0, 1.0)


def test_answers_that_wait_for_the_cache() -> None:
    one = estimator()
    rows = one.config.trajectories_per_batch // 8
    assert count_answers_at_once(one.config, one.memory, 8192) == (rows, 0)
    small = replace(one.memory, kv_cache_tokens=8192 * 5 + 8191)
    assert count_answers_at_once(one.config, small, 8192) == (5, rows - 5)
    assert count_answers_at_once(one.config, replace(small, kv_cache_tokens=100), 8192) == (0, rows)


def test_a_step_of_an_engine_reads_weights_and_cache() -> None:
    one = estimator()
    rows, sizes = one.config.trajectories_per_batch // 8, load_model_sizes(one.config.actor_rollout_ref.model)
    cache = rows * (1024 + 50) * 24 * 2 * 2 * 64 * 2  # 24 layers, keys and values of two heads of 64, in bfloat16
    expected = 100 * ((2 * sizes.parameters + cache) / 1e9 + speed.ENGINE_STEP)
    assert one.estimate_generation(SLOW_MEMORY, 100) == pytest.approx(expected)
    waiting = replace(one, memory=replace(one.memory, kv_cache_tokens=1124 * (rows // 2)))
    assert waiting.estimate_generation(SLOW_MEMORY, 100) > 1.5 * expected


def test_an_update_takes_its_passes() -> None:
    flops = DeviceSpeed(1e12, 1e30, 1e30, 1e30, 0.0)
    one = estimator()
    sizes = load_model_sizes(one.config.actor_rollout_ref.model)
    assert sizes.flops
    attention = 24 * 14 * 64 * 1124**2  # forward: a third of 6 FLOPs per pair of tokens, of which half are causal
    forward = one.config.trajectories_per_batch * (2 * sizes.flops.num_parameters * 1124 + 2 * attention) / 8 / 1e12
    assert one.estimate_update(flops, 100, 1.0) == pytest.approx(3 * forward)
    assert one.estimate_update(flops, 100, 0.5) == pytest.approx(1.5 * forward)
    checkpointed = estimator(actor_rollout_ref__model__enable_gradient_checkpointing=True)
    assert replace(checkpointed, num_passes=1).estimate_update(flops, 100, 1.0) == pytest.approx(5 * forward)
    for choice, seconds in {True: 1.0, 5: 4 / 24, "selective": 0.0}.items():
        recomputing = estimator(actor_rollout_ref__model__enable_gradient_checkpointing=choice)
        assert recomputing.estimate_update(flops, 100, 1.0) == pytest.approx((3 + seconds) * forward)
        fast, _ = recomputing.estimate(flops)
        assert fast.recompute == pytest.approx(fast.update * seconds / (3 + seconds))
    offloads = {"enable_gradient_checkpointing": True, "activation_offload": True}
    offloading = estimator(**{f"actor_rollout_ref__model__{key}": value for key, value in offloads.items()})
    inputs = one.config.trajectories_per_batch * 1124 * 24 * 896 * 2 / 8
    slow = offloading.estimate_update(flops._replace(train_flops=1e30), 100, 1.0)
    assert slow == pytest.approx(2 * inputs / speed.HOST_LINK)
    traffic = replace(one.memory, traffic_bytes=10**12, shards=16)  # between nodes, for each micro-batch
    count = one.config.trajectories_per_batch * 1124 / 8 / 16384
    slow = replace(one, memory=traffic).estimate_update(flops._replace(train_flops=1e30, link=4.5e11), 100, 1.0)
    assert slow == pytest.approx(max(count, one.config.num_mini_batches) * 1e12 / speed.NETWORK, rel=0.01)


def test_known_gpus_give_a_range_and_others_none() -> None:
    one, h100 = estimator(), Machine(0, 8, 80 * GIB, gpu_name="h100")
    found = find_device_speed(one.config, one.placement, h100)
    assert found == DeviceSpeed(989e12, 989e12, 3.35e12, 4.5e11)
    assert find_gpu("NVIDIA H100 80GB HBM3") == GPUS["h100"] and find_gpu("NVIDIA A100-SXM4-40GB") == GPUS["a100_40"]
    assert find_device_speed(one.config, one.placement, Machine(0, 8, gpu_name="24GiB")) is None
    fast, slow = one.estimate(found)
    assert 0 < fast.step < slow.step and fast.tokens < slow.tokens
    assert format_range(slow.step, fast.step).count(" to ") == 1
    assert format_range(2.04, 2.01) == "2" and format_range(1234, 9.51) == "9.5 to 1,234"


def test_a_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MEASURED_SECONDS", 0.01)
    config = resolved("qwen2.5-0.5b", 1, {TOKENS: 256, "actor_rollout_ref.rollout.max_num_seqs": 8}, device="cpu")
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_response_length": 64})})
    found = find_device_speed(config, Placement(device="cpu", ranks_per_node=1, threads=1), Machine(2, 0))
    assert found and min(found) > 0 and found.train_flops > 1e9 and found.sequence_step < 0.1


def test_the_smallest_gpu_of_this_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '143771, NVIDIA H200'\necho '81559, NVIDIA H100 80GB HBM3'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert query_smallest_gpu() == {"gpu_memory": 81559 * 2**20, "gpu_name": "NVIDIA H100 80GB HBM3"}
    tool.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert query_smallest_gpu() == {"gpu_memory": 0, "gpu_name": ""}
