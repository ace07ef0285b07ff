"""Memory plan of fine-tuning: choose gradient checkpointing and refuse what cannot fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.model_memory import (
    GIB,
    RAY,
    RUNTIME,
    MemoryPlan,
    bytes_of,
    inference_of,
    largest_micro_batch,
    trained_model,
    with_copies,
)
from alphaapollo.models.footprint import FLOAT32, Held, Trained, frozen_slices

ANSWERING = "answers"  # the moment of a validation in which prompts are answered


@dataclass(frozen=True)
class MemoryRequest:
    """What a task needs to run on its examples."""

    longest: int  # tokens of the longest row
    rows: int = 1  # rows per example, which stay together
    head: bool = True  # whether log-probs over the vocabulary are computed, rather than one number per row
    reference: bool = False  # whether a frozen copy of the model is kept (with LoRA the base model serves as such)
    answers: tuple[int, int, int] | None = None  # sampled at a time on a rank: number, prompt tokens, response tokens


def fit(
    config: TuningConfig, model: Model, device: Device, memory_request: MemoryRequest, capacity: int, host: int = 0
) -> tuple[Model, MemoryPlan]:
    """The resolved model with gradient checkpointing on where the plan may choose and finds it needed.

    Args:
        capacity: bytes of one GPU, or of the machine for training on a CPU; 0: not known.
        host: bytes of a GPU machine's own memory; 0: not known.

    `problem` of the plan says what cannot fit, and the keys that help.
    """

    def planned(one: Model, offload: bool = False) -> MemoryPlan:
        fsdp = config.fsdp_config.model_copy(update={"offload_policy": True}) if offload else config.fsdp_config
        return plan_memory(config.model_copy(update={"fsdp_config": fsdp}), one, device, memory_request, capacity)

    checkpointing = model.model_copy(update={"enable_gradient_checkpointing": True})
    plan = planned(model)
    if config.model.enable_gradient_checkpointing == "auto" and not plan.comfortable:
        model, plan = checkpointing, planned(checkpointing)
    if plan.fits:
        return model, with_copies(plan, device, host)
    moment, held = plan.peak
    if moment == ANSWERING:
        advice = "Lower rollout.max_num_seqs, data.max_prompt_length or data.max_response_length."
    elif planned(checkpointing).fits:
        advice = "Set model.enable_gradient_checkpointing=true."
    elif device == "cuda" and planned(checkpointing, offload=True).fits:
        advice = (
            "Set fsdp_config.offload_policy=true and model.enable_gradient_checkpointing=true, or raise "
            "trainer.n_gpus_per_node."
        )
    else:
        advice = (
            "Raise trainer.n_gpus_per_node or trainer.nnodes, lower data.max_token_len_per_gpu and data.max_length, or "
            "set model.lora_rank=16."
        )
    problem = f"memory: {held.total / GIB:.1f} GiB are needed on {plan.what} at its peak ({moment}). {advice}"
    return model, replace(plan, problem=problem)


def plan_memory(
    config: TuningConfig, model: Model, device: Device, memory_request: MemoryRequest, capacity: int
) -> MemoryPlan:
    """Of a resolved model."""
    trainer = config.trainer
    size = micro_batch(config, memory_request)
    trained = trained_model(model, config.fsdp_config, device, trainer.num_ranks, size, memory_request.head)
    beside = Held(runtime=RUNTIME[device])
    if memory_request.reference and not trained.adapters and not trained.offload_policy:
        beside += Held(frozen=frozen_slices(trained.sizes, trained.shards, bytes_of(model.dtype)))
    own = trained.updating()
    if memory_request.answers:
        own[ANSWERING] = answering(trained, model, *memory_request.answers)
    moments = {name: held + beside for name, held in own.items()}
    copies = trained.saved() * trainer.n_gpus_per_node if trainer.save_freq > 0 else 0
    if device == "cuda":
        on_host = trained.on_host() * trainer.n_gpus_per_node
        return MemoryPlan(moments, capacity, "a GPU", 0, host=on_host, copies=copies)
    driver = Held(runtime=RUNTIME["cpu"] + RAY) if resolve_controller(trainer) == "ray" else Held()
    node = {name: held * trainer.n_gpus_per_node + driver for name, held in moments.items()}
    return MemoryPlan(node, capacity, "this machine", 0, copies=copies)


def answering(trained: Trained, model: Model, count: int, prompt: int, answer: int) -> Held:
    """While a rank samples so many answers at a time: their prompts in one forward pass, then keys and values of all
    tokens."""
    sizes, width = trained.sizes, trained.dtype_bytes
    return trained.resting() + Held(
        gathered=width * (sizes.root + 2 * sizes.unit),
        activations=inference_of(model, count * prompt),
        logits=2 * FLOAT32 * count * (sizes.head // sizes.hidden_size),
        kv_cache=width * sizes.kv_elements * count * (prompt + answer),
    )


def micro_batch(config: TuningConfig, memory_request: MemoryRequest) -> tuple[int, int]:
    """Rows and their length of the largest micro-batch of a rank."""
    data, shared = config.data, config.ulysses_sequence_parallel_size
    examples, tokens = largest_micro_batch(
        memory_request.longest * memory_request.rows,
        data.train_batch_size,
        data.max_token_len_per_gpu,
        config.trainer.num_ranks,
        shared,
    )
    return examples * memory_request.rows, max(1, tokens // memory_request.rows)
