"""Memory plan of fine-tuning, and automatic choice of the token budget and gradient checkpointing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from alphaapollo.config.resolve import resolve_controller
from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.memory.fit import MAX_TOKENS, MIN_TOKENS, halve
from alphaapollo.launch.memory.model import (
    FLOAT32,
    MemoryUsage,
    TrainedModelMemory,
    compute_micro_batch_shape,
    count_frozen_bytes,
    get_dtype_bytes,
    measure_forward_bytes,
    plan_trained_model,
)
from alphaapollo.launch.memory.plan import RAY, RUNTIME, MemoryPlan

SAMPLING = "answers"  # moment of a validation in which responses are sampled
SAMPLING_HINT = "Lower rollout.max_num_seqs, data.max_prompt_length or data.max_response_length."
HINT = (
    "Set model.enable_gradient_checkpointing=true, fsdp_config.offload_policy=true (GPUs only) or model.lora_rank=16, "
    "lower data.max_token_len_per_gpu and data.max_length, or raise trainer.n_gpus_per_node or trainer.nnodes."
)


@dataclass(frozen=True)
class MemoryRequest:
    """Properties of a fine-tuning task that determine its memory."""

    longest_row: int  # number of tokens of the longest row (token sequence)
    rows_per_example: int = 1  # e.g. 2 for pairs; the rows of an example stay in one micro-batch
    computes_logits: bool = True  # True: log-probs over the vocabulary; False: one number per row
    needs_reference: bool = False  # whether a frozen copy of the model is needed (with LoRA the base model is used)
    sampling_shape: tuple[int, int, int] | None = None  # per rank: (responses at once, prompt tokens, response tokens)


def fit_finetuning_to_memory(
    config: TuningConfig, model: Model, device: Device, request: MemoryRequest, capacity: int, host_memory: int = 0
) -> tuple[Model, int, MemoryPlan]:
    """Plan the memory of fine-tuning, and choose the token budget and gradient checkpointing where they are `auto`.
    Returns the model section, the token budget and the plan, with a `problem` if the run cannot fit.

    Args:
        model: resolved model section.
        capacity: bytes of one GPU, or of the machine for training on a CPU; 0: unknown.
        host_memory: bytes of host memory of a GPU node; 0: unknown.
    """

    may_checkpoint, budget = config.model.enable_gradient_checkpointing == "auto", config.data.max_token_len_per_gpu
    longest = request.longest_row * request.rows_per_example // config.ulysses_sequence_parallel_size
    budgets = [MAX_TOKENS, *halve(MAX_TOKENS, max(longest, MIN_TOKENS))] if budget == "auto" else [budget]
    models = [model, model.model_copy(update={"enable_gradient_checkpointing": True})] if may_checkpoint else [model]
    for model, tokens in product(models, budgets):
        plan = _plan_memory(config, model, device, request, tokens, capacity)
        if plan.has_headroom_in_update:
            break
    plan = plan.add_shortage(lambda: SAMPLING_HINT if plan.peak[0] == SAMPLING else HINT)
    return model, tokens, plan if plan.problem else plan.add_checkpoint_copies(device, host_memory)


def _plan_memory(
    config: TuningConfig, model: Model, device: Device, request: MemoryRequest, max_tokens: int, capacity: int
) -> MemoryPlan:
    trainer, shape = config.trainer, find_micro_batch_shape(config, request, max_tokens)
    trained = plan_trained_model(
        model, config.fsdp_config, device, trainer.num_ranks, shape, shape[1], request.computes_logits
    )
    trained = replace(trained, optimizer=config.optim.name)
    fixed = MemoryUsage(runtime=RUNTIME[device])
    if request.needs_reference and not trained.num_lora_parameters and not trained.offload_policy:
        fixed += MemoryUsage(
            frozen_models=count_frozen_bytes(trained.sizes, trained.shards, get_dtype_bytes(model.dtype))
        )
    of_model = trained.usage_during_update()
    if request.sampling_shape:
        of_model[SAMPLING] = _estimate_sampling_memory(trained, model, *request.sampling_shape)
    phases = {name: usage + fixed for name, usage in of_model.items()}
    copies = trained.checkpoint_bytes() * trainer.n_gpus_per_node if trainer.save_freq > 0 else 0
    if device == "cuda":
        offloaded = trained.offloaded_bytes() * trainer.n_gpus_per_node
        return MemoryPlan(phases, capacity, "a GPU", offloaded_bytes=offloaded, checkpoint_copy_bytes=copies)
    driver = MemoryUsage(runtime=RUNTIME["cpu"] + RAY) if resolve_controller(trainer) == "ray" else MemoryUsage()
    node = {name: usage * trainer.n_gpus_per_node + driver for name, usage in phases.items()}
    return MemoryPlan(node, capacity, "this machine", checkpoint_copy_bytes=copies)


def _estimate_sampling_memory(
    trained: TrainedModelMemory, model: Model, num_responses: int, prompt_tokens: int, response_tokens: int
) -> MemoryUsage:
    """Return the memory of a rank that samples `num_responses` responses at a time in a validation."""
    sizes, width = trained.sizes, trained.dtype_bytes
    return trained.usage_while_idle() + MemoryUsage(
        gathered_layers=width * (sizes.root_parameters + 2 * trained.gathered_layer_parameters),
        activations=measure_forward_bytes(model, num_responses * prompt_tokens),
        logits=2 * FLOAT32 * num_responses * (sizes.head_parameters // sizes.hidden_size),
        kv_cache=width * sizes.kv_elements_per_token * num_responses * (prompt_tokens + response_tokens),
    )


def find_micro_batch_shape(config: TuningConfig, request: MemoryRequest, max_tokens: int) -> tuple[int, int]:
    """Return (rows, tokens per row) of the largest micro-batch on a rank."""
    data, shared = config.data, config.ulysses_sequence_parallel_size
    longest, ranks = request.longest_row * request.rows_per_example, config.trainer.num_ranks
    examples, tokens = compute_micro_batch_shape(longest, data.train_batch_size, max_tokens, ranks, shared)
    return examples * request.rows_per_example, max(1, tokens // request.rows_per_example)
