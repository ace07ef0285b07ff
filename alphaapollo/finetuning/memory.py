"""Memory of fine-tuning before it starts: gradient checkpointing chosen, and what cannot fit refused."""

from __future__ import annotations

from dataclasses import replace

from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.models.footprint import Held
from alphaapollo.startup.model_memory import GIB, RUNTIME, MemoryPlan, largest_micro_batch, trained_model


def fit_sft(
    config: SftConfig, model: Model, device: Device, ranks: int, ranks_per_node: int, longest: int, capacity: int
) -> tuple[Model, MemoryPlan]:
    """The resolved model with gradient checkpointing on where the plan may choose and finds it needed.

    Args:
        longest: tokens of the longest example.
        capacity: bytes of one GPU, or of the machine for training on a CPU; 0: not known.

    `problem` of the plan says what cannot fit, and the keys that help.
    """
    count = ranks_per_node if device == "cpu" else 1

    def planned(one: Model, offload: bool = False) -> MemoryPlan:
        fsdp = config.fsdp_config.model_copy(update={"offload_policy": True}) if offload else config.fsdp_config
        trained = trained_model(one, fsdp, device, ranks, micro_batch(config, ranks, longest))
        moments = {name: (held + Held(runtime=RUNTIME[device])) * count for name, held in trained.updating().items()}
        return MemoryPlan(moments, capacity, "a GPU" if device == "cuda" else "this machine", 0)

    checkpointing = model.model_copy(update={"enable_gradient_checkpointing": True})
    plan = planned(model)
    if config.model.enable_gradient_checkpointing == "auto" and not plan.comfortable:
        model, plan = checkpointing, planned(checkpointing)
    if plan.fits:
        return model, plan
    moment, held = plan.peak
    if planned(checkpointing).fits:
        advice = "Set model.enable_gradient_checkpointing=true."
    elif device == "cuda" and planned(checkpointing, offload=True).fits:
        advice = (
            "Set fsdp_config.offload_policy=true and model.enable_gradient_checkpointing=true, or start more ranks."
        )
    else:
        advice = "Start more ranks, lower data.max_token_len_per_gpu and data.max_length, or set model.lora_rank=16."
    problem = f"memory: {held.total / GIB:.1f} GiB are needed on {plan.what} at its peak ({moment}). {advice}"
    return model, replace(plan, problem=problem)


def micro_batch(config: SftConfig, ranks: int, longest: int) -> tuple[int, int]:
    """Rows and their length of the largest micro-batch of a rank."""
    data, shared = config.data, config.ulysses_sequence_parallel_size
    return largest_micro_batch(longest, data.train_batch_size, data.max_token_len_per_gpu, ranks, shared)
