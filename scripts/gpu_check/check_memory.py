"""Memory of a worker after an update, and the peaks of its start and its update, against the memory plan."""

from __future__ import annotations

from typing import Any

import torch

from alphaapollo.config.schema import Model
from alphaapollo.launch.memory.model import ADAM, FLOAT32, TrainedModelMemory
from alphaapollo.models.activation_memory import (
    TrainingPass,
    load_on_meta_device,
    measure_activation_bytes,
    read_model_sizes,
)
from scripts.gpu_check.kit import Kit, vocabulary_of
from scripts.random_batch import random_batch

GIB = 2**30
LENGTHS = [1024] * 8


def run(kit: Kit) -> dict[str, Any]:
    kit.need_gpu("memory on the device")
    folder = kit.model()
    torch.ones(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    worker = kit.worker(folder, model={"enable_gradient_checkpointing": False})
    weights = FLOAT32 * sum(parameter.numel() for parameter in worker.policy.parameters())
    start = torch.cuda.max_memory_allocated()
    batch, columns = random_batch(LENGTHS, vocabulary_of(folder), sum(LENGTHS), worker.builder.padded)
    worker.load_batch(batch)
    worker.update(columns)
    torch.cuda.reset_peak_memory_stats()
    worker.update(columns)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    worker.offload()
    kept = free - torch.cuda.mem_get_info()[0]
    planned = max(held.total for held in plan(folder).values())
    figures = {
        "weights_gib": weights / GIB,
        "start_peak_gib": start / GIB,
        "after_update_gib": kept / GIB,
        "update_peak_gib": peak / GIB,
        "update_reserved_gib": reserved / GIB,
        "planned_peak_gib": planned / GIB,
        "planned_over_measured": planned / peak,
    }
    assert start < 1.5 * weights + GIB, f"the start used {start / GIB:.1f} GiB for {weights / GIB:.1f} GiB of weights"
    assert kept < weights * (FLOAT32 + ADAM) / FLOAT32 + GIB, f"{kept / GIB:.1f} GiB remain allocated after an update"
    assert 0.85 < planned / peak < 1.15, f"planned {planned / GIB:.2f} GiB, measured {peak / GIB:.2f} GiB"
    return figures


def plan(folder: Any) -> dict[str, Any]:
    model = load_on_meta_device(Model(path=str(folder)), torch.bfloat16)
    share = measure_activation_bytes(model, TrainingPass(len(LENGTHS), LENGTHS[0], False, "cuda"))
    return TrainedModelMemory(read_model_sizes(model), share, shards=1, dtype_bytes=2).usage_during_update()
