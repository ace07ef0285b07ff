"""Memory plan of fine-tuning, and automatic choice of gradient checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.memory.model import (
    FLOAT32,
    MemoryUsage,
    TrainedModel,
    count_frozen_bytes,
    get_dtype_bytes,
    largest_micro_batch,
    measure_inference,
    plan_trained_model,
)
from alphaapollo.launch.memory.plan import RAY, RUNTIME, MemoryPlan

ANSWERING = "answers"  # moment of a validation in which responses are sampled
ANSWERING_HINT = "Lower rollout.max_num_seqs, data.max_prompt_length or data.max_response_length."
HINT = (
    "Set model.enable_gradient_checkpointing=true, fsdp_config.offload_policy=true (GPUs only) or model.lora_rank=16, "
    "lower data.max_token_len_per_gpu and data.max_length, or raise trainer.n_gpus_per_node or trainer.nnodes."
)


@dataclass(frozen=True)
class MemoryRequest:
    """Memory requirements of a fine-tuning task."""

    longest: int  # number of tokens of the longest row
    rows: int = 1  # rows per example; they stay in one micro-batch
    head: bool = True  # True: log-probs over the vocabulary are computed; False: one number per row
    reference: bool = False  # whether a frozen copy of the model is needed (with LoRA the base model is used)
    answers: tuple[int, int, int] | None = None  # per rank: (responses at a time, prompt tokens, response tokens)


def fit_finetuning(
    config: TuningConfig, model: Model, device: Device, request: MemoryRequest, capacity: int, host: int = 0
) -> tuple[Model, MemoryPlan]:
    """Plan the memory, and enable gradient checkpointing if it is `auto` and needed. Returns the model section and the
    plan, whose `problem` is set if the run cannot fit.

    Args:
        model: resolved model section.
        capacity: bytes of one GPU, or of the machine for training on a CPU; 0: unknown.
        host: bytes of host memory of a GPU node; 0: unknown.
    """

    plan = _plan(config, model, device, request, capacity)
    if config.model.enable_gradient_checkpointing == "auto" and not plan.has_headroom:
        model = model.model_copy(update={"enable_gradient_checkpointing": True})
        plan = _plan(config, model, device, request, capacity)
    if plan.fits:
        return model, plan.add_copies(device, host)
    return model, plan.reject(ANSWERING_HINT if plan.peak[0] == ANSWERING else HINT)


def _plan(config: TuningConfig, model: Model, device: Device, request: MemoryRequest, capacity: int) -> MemoryPlan:
    trainer, size = config.trainer, micro_batch(config, request)
    trained = plan_trained_model(model, config.fsdp_config, device, trainer.num_ranks, size, request.head)
    fixed = MemoryUsage(runtime=RUNTIME[device])
    if request.reference and not trained.adapters and not trained.offload_policy:
        fixed += MemoryUsage(
            frozen_models=count_frozen_bytes(trained.sizes, trained.shards, get_dtype_bytes(model.dtype))
        )
    of_model = trained.plan_update()
    if request.answers:
        of_model[ANSWERING] = _answering(trained, model, *request.answers)
    moments = {name: usage + fixed for name, usage in of_model.items()}
    copies = trained.checkpoint_bytes() * trainer.n_gpus_per_node if trainer.save_freq > 0 else 0
    if device == "cuda":
        offloaded = trained.host_bytes() * trainer.n_gpus_per_node
        return MemoryPlan(moments, capacity, "a GPU", 0, host=offloaded, copies=copies)
    driver = MemoryUsage(runtime=RUNTIME["cpu"] + RAY) if resolve_controller(trainer) == "ray" else MemoryUsage()
    node = {name: usage * trainer.n_gpus_per_node + driver for name, usage in moments.items()}
    return MemoryPlan(node, capacity, "this machine", 0, copies=copies)


def _answering(trained: TrainedModel, model: Model, count: int, prompt: int, response: int) -> MemoryUsage:
    """Return the memory of a rank that samples `count` responses at a time: prefill of the prompts and KV cache."""
    sizes, width = trained.sizes, trained.dtype_bytes
    return trained.idle() + MemoryUsage(
        gathered_layers=width * (sizes.root + 2 * sizes.unit),
        activations=measure_inference(model, count * prompt),
        logits=2 * FLOAT32 * count * (sizes.head // sizes.hidden_size),
        kv_cache=width * sizes.kv_elements * count * (prompt + response),
    )


def micro_batch(config: TuningConfig, request: MemoryRequest) -> tuple[int, int]:
    """Return number and length, in tokens, of the rows of a rank's largest micro-batch."""
    data, shared = config.data, config.ulysses_sequence_parallel_size
    longest, ranks = request.longest * request.rows, config.trainer.num_ranks
    examples, tokens = largest_micro_batch(longest, data.train_batch_size, data.max_token_len_per_gpu, ranks, shared)
    return examples * request.rows, max(1, tokens // request.rows)
