"""Memory of an update against the memory plan, with gradient checkpointing, LoRA and each offload; GB/s of
offloading and reloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Actor, Model
from alphaapollo.planning.model_memory import FLOAT32, RankModel, estimate_update, make_rank_model
from scripts.gpu_check.device import GIB
from scripts.gpu_check.kit import MODEL, Kit, need, vocabulary_of
from scripts.random_batch import random_batch

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "selective": {"model": {"enable_gradient_checkpointing": "selective"}},
    "activation_offload": {"model": {"enable_gradient_checkpointing": True, "activation_offload": True}},
    "lora": {"model": {"lora_rank": 16}},
    "param_offload": {"actor": {"fsdp_config": {"param_offload": True}}},
    "optimizer_offload": {"actor": {"fsdp_config": {"optimizer_offload": True}}},
    "offload_policy": {"actor": {"fsdp_config": {"offload_policy": True}}},
}
LENGTHS = {"cuda": [1024] * 8, "cpu": [32] * 2}
TOLERANCE = 0.25  # relative


def run(kit: Kit) -> None:
    folder = kit.model()
    for name, settings in VARIANTS.items():
        with kit.part(name):
            measure(kit, folder, name, settings)


def measure(kit: Kit, folder: Path, name: str, settings: dict[str, Any]) -> None:
    if name == "lora":
        need("peft")
    lengths = LENGTHS[kit.device]
    kit.memory.free_unused()
    kit.memory.reset_peak()
    worker = kit.worker(folder, **settings)
    start, weights = kit.memory.get_peak(), FLOAT32 * sum(p.numel() for p in worker.policy.parameters())
    batch, columns = random_batch(lengths, vocabulary_of(folder), sum(lengths), worker.builder.padded)
    worker.load_batch(batch)
    worker.update(columns)
    kit.memory.reset_peak()
    worker.update(columns)
    peak, loaded = kit.memory.get_peak(), kit.memory.get_allocated()
    planned = estimate_update(plan_variant(kit.device, folder, settings, lengths)).total()
    measurements = {"peak_gib": peak / GIB}
    worker.offload()  # allocates page-locked memory
    worker.state.reload()
    with kit.clock() as down:
        worker.offload()
    idle = kit.memory.get_allocated()
    with kit.clock() as up:
        worker.state.reload()
    worker.offload()
    measurements["idle_gib"] = idle / GIB
    if name == "param_offload":
        measurements |= {"to_host_gb_per_s": weights / down[0] / 1e9, "from_host_gb_per_s": weights / up[0] / 1e9}
    if name == "plain":
        measurements |= {"weights_gib": weights / GIB, "start_peak_gib": start / GIB, "loaded_gib": loaded / GIB}
        measurements["device_used_gib"] = kit.memory.get_used() / GIB
    for measurement, value in measurements.items():
        kit.record(f"{name} {measurement}", value)
    worker.close()
    if kit.on_gpu:
        assert abs(planned / peak - 1) < TOLERANCE, f"planned {planned / GIB:.2f} GiB, measured {peak / GIB:.2f} GiB"
        assert name != "plain" or start < 1.5 * weights + GIB, f"the start used {start / GIB:.1f} GiB"


def plan_variant(device: str, folder: Path, settings: dict[str, Any], lengths: list[int]) -> RankModel:
    model = resolve_model(Model(path=str(folder), **MODEL | settings.get("model", {})), device)  # type: ignore[arg-type]
    fsdp, shape = Actor(**settings.get("actor", {})).fsdp_config, (len(lengths), lengths[0])
    return make_rank_model(model, fsdp, device, 1, shape, steps_per_update=1)  # type: ignore[arg-type]
