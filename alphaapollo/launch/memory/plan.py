"""Plan the memory of an RL run: bytes on a GPU, or on a machine without GPUs, in each phase of an iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.divergence import REVERSE, Divergence, make_divergence
from alphaapollo.config.resolve import get_resolved
from alphaapollo.config.schema import Actor, Config, Critic, Model, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.builders import make_critic_model_section, make_teacher_model_sections
from alphaapollo.launch.memory.model import (
    FLOAT32,
    FrozenModelMemory,
    MemoryUsage,
    TrainedModelMemory,
    compute_micro_batch_shape,
    count_frozen_bytes,
    get_dtype_bytes,
    load_model_sizes,
    measure_forward_bytes,
    plan_frozen_model,
    plan_trained_model,
)
from alphaapollo.models.activation_memory import ModelSizes
from alphaapollo.weight_sync.buckets import get_largest_bucket_bytes

GIB = 2**30
RUNTIME = {"cuda": GIB, "cpu": GIB * 6 // 10}  # bytes per process: CUDA context and NCCL buffers, or imported libraries
FURTHER_PROCESS = GIB * 6 // 10  # bytes of each further process on a GPU
SLEEPING_ENGINE = GIB * 5 // 2  # bytes that a sleeping engine keeps: CUDA context, NCCL and tensor-parallel buffers
RAY = GIB * 9 // 10  # bytes of Ray's processes on a node
COMFORTABLE = 0.9  # usable share of a device, because of fragmentation
FULL = 0.95  # share of a device above which an out-of-memory error is likely
DEFAULT_ENGINE_SHARE = 0.5  # of a GPU of unknown size
MIN_ROWS = 8  # sequences of maximum length for which an engine should have KV cache
OF_MICRO_BATCHES = ("update", "the teacher's pass", "head", "layer", "root", "step")  # beginnings of phase names
UNMEASURED = (RuntimeError, TypeError, AttributeError, LookupError)  # from model code that needs data


def format_memory_planning_failure(model_path: str, error: BaseException, is_gradient_checkpointing_auto: bool) -> str:
    """Return a notice that the memory cannot be planned, because the model failed on the meta device with `error`."""
    reason = str(error).strip().split("\n")[0].rstrip(".!")
    failure = f"{type(error).__name__}: {reason}"
    notice = f"the memory of {model_path} is not planned, because the model cannot run on the meta device ({failure})."
    return f"{notice} Gradient checkpointing stays off." if is_gradient_checkpointing_auto else notice


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory of one GPU, or of a machine without GPUs, in each phase of an iteration."""

    usage_by_phase: dict[str, MemoryUsage]
    capacity: int  # bytes; 0: unknown
    device_name: str  # description of the device in messages
    kv_cache_tokens: int = 0  # capacity of an engine's KV cache
    flexible_kv_cache: int = 0  # bytes of the cache that the run could do without
    kv_cache_shortage: str = ""  # why the cache certainly cannot hold one sequence; "": it may
    engine_share: float = 0.0  # share of a GPU that an engine may use
    offloaded_bytes: int = 0  # bytes that GPUs offload to a node's host memory
    checkpoint_copy_bytes: int = 0  # bytes of the copies, in a node's host memory, from which checkpoints are written
    on_gpu: bool = False
    saves_in_background: bool = True  # whether these copies fit into memory
    problem: str = ""  # why the run certainly does not fit, and the keys that reduce memory; "": it may fit
    warning: str = ""  # why the run may not fit, and the keys that reduce memory; "": it fits as far as is known

    @property
    def peak(self) -> tuple[str, MemoryUsage]:
        """Phase with the most memory, and its memory."""
        return max(self.usage_by_phase.items(), key=lambda item: item[1].total)

    @property
    def is_possible(self) -> bool:
        """Whether the kinds of memory that are known exactly fit."""
        return not self.kv_cache_shortage and (not self.capacity or self._certain_plan.peak[1].total <= self.capacity)

    @property
    def _certain_plan(self) -> MemoryPlan:
        """The plan with only those kinds of memory that are known exactly and cannot be reduced."""
        certain = {phase: usage.certain for phase, usage in self.usage_by_phase.items()}
        for phase, usage in certain.items():
            certain[phase] = replace(usage, kv_cache=max(0, usage.kv_cache - self.flexible_kv_cache))
        return replace(self, usage_by_phase=certain)

    @property
    def is_likely(self) -> bool:
        """Whether the estimate leaves at least 5 % free."""
        return self.is_possible and (not self.capacity or self.peak[1].total <= FULL * self.capacity)

    @property
    def has_headroom(self) -> bool:
        """Whether the estimate leaves at least 10 % free, for fragmentation."""
        return self.is_possible and (not self.capacity or self.peak[1].total <= COMFORTABLE * self.capacity)

    @property
    def has_headroom_in_update(self) -> bool:
        """Whether the phases have headroom whose memory depends on the micro-batches."""
        phases = {name: usage for name, usage in self.usage_by_phase.items() if name.startswith(OF_MICRO_BATCHES)}
        return replace(self, usage_by_phase=phases, kv_cache_shortage="").has_headroom

    def add_shortage(self, suggest: Callable[[], str]) -> MemoryPlan:
        """Return the plan with a `problem` if the run cannot fit, or a `warning` if it may not fit. suggest: returns a
        sentence with settings that save memory."""
        if self.kv_cache_shortage:
            return replace(self, problem=f"{self.kv_cache_shortage}. {suggest()}")
        if not self.is_possible:
            return replace(self, problem=f"{self._certain_plan._describe_peak('at least ')}. {suggest()}")
        if self.is_likely:
            return self
        shortage = f"{self._describe_peak('about ')}, so the run may end with an out-of-memory error"
        return replace(self, warning=f"{shortage}. {suggest()}")

    def _describe_peak(self, accuracy: str) -> str:
        phase, usage = self.peak
        largest = sorted(usage.to_dict().items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{kind.replace('_', ' ')} {size / GIB:.1f}" for kind, size in largest)
        needed = f"{accuracy}{usage.total / GIB:.1f} GiB are needed on {self.device_name}"
        return f"memory: {needed} at its peak ({phase}: {parts})"

    def add_checkpoint_copies(self, device: Device, host_memory: int) -> MemoryPlan:
        """Return the plan with the copies from which checkpoints are written, if they fit. host_memory: bytes of host
        memory of a GPU node; 0: unknown."""
        if device == "cuda":
            fits = not host_memory or self.offloaded_bytes + self.checkpoint_copy_bytes <= COMFORTABLE * host_memory
            return replace(self, saves_in_background=fits)
        copies = MemoryUsage(checkpoint_copy=self.checkpoint_copy_bytes)
        plan = replace(self, usage_by_phase={name: usage + copies for name, usage in self.usage_by_phase.items()})
        return plan if plan.has_headroom else replace(self, saves_in_background=False)


def plan_memory(config: Config, device: Device, capacity: int) -> MemoryPlan:
    """Plan the memory of a checked configuration with resolved `model` and `rollout` sections.

    capacity: bytes of one GPU, or of the machine for training on a CPU; 0: unknown.
    """
    role, trainer = config.actor_rollout_ref, config.trainer
    rollout, sizes = role.rollout, load_model_sizes(role.model)
    phases, offloaded, copies = _estimate_rank_memory_by_phase(config, device)
    engine = _estimate_engine_memory(config, device)
    share = _get_engine_share(config, phases, engine, capacity) if device == "cuda" else 0
    cache = int(share * capacity) - engine.total if share else int(rollout.kv_cache_gib * GIB)
    engine += MemoryUsage(kv_cache=max(0, cache) if rollout.name == "vllm" else 0)
    longest, token_bytes = config.data.max_length, count_kv_token_bytes(rollout, sizes)
    is_auto = share and rollout.gpu_memory_utilization == "auto"
    flexible = max(0, engine.kv_cache - longest * token_bytes) if is_auto else 0
    copies *= trainer.n_gpus_per_node if trainer.save_freq > 0 or trainer.record_steps else 0
    shortage = _describe_kv_cache_shortage(config, engine.engine_weights, longest * token_bytes, share, capacity)
    kv_cache = (engine.kv_cache // token_bytes, flexible, shortage)
    engine += _estimate_sleeping_engine_memory(rollout) if device == "cuda" else MemoryUsage()
    if device == "cpu":
        shared = engine * (rollout.num_engines or 1) + MemoryUsage(runtime=_count_imported_library_bytes(config))
        node = {name: usage * trainer.n_gpus_per_node + shared for name, usage in phases.items()}
        return MemoryPlan(node, capacity, "this machine", *kv_cache, checkpoint_copy_bytes=copies)
    if not rollout.colocate:
        del phases["generate"]
        phases["generate (an engine's GPU)"] = engine
    elif rollout.free_cache_engine:
        asleep = _estimate_sleeping_engine_memory(rollout)
        phases = {name: usage + (engine if name == "generate" else asleep) for name, usage in phases.items()}
        phases["publish"] += _estimate_receiving_engine_memory(rollout, sizes, engine.engine_weights)
    else:
        phases = {name: usage + engine for name, usage in phases.items()}
    device_name = f"a GPU of {capacity / GIB:.0f} GiB" if capacity else "a GPU"
    offloaded *= trainer.n_gpus_per_node
    return MemoryPlan(phases, capacity, device_name, *kv_cache, share, offloaded, copies, on_gpu=True)


def _get_engine_share(config: Config, phases: Mapping[str, MemoryUsage], engine: MemoryUsage, capacity: int) -> float:
    """Return rollout.gpu_memory_utilization or, if it is `auto`, the share of a GPU that training leaves to an engine,
    but at least what the engine needs for MIN_ROWS sequences.

    phases: memory of a training rank by phase. engine: memory of an engine without KV cache. capacity: bytes of a GPU;
    0: unknown.
    """
    rollout, sizes = config.actor_rollout_ref.rollout, load_model_sizes(config.actor_rollout_ref.model)
    if rollout.gpu_memory_utilization != "auto":
        return rollout.gpu_memory_utilization
    if not capacity:
        return DEFAULT_ENGINE_SHARE
    shared = [phases["generate"]] if rollout.free_cache_engine else phases.values()
    training = max(usage.total for usage in shared) if rollout.colocate else 0
    beside = training + _estimate_sleeping_engine_memory(rollout).total
    needed = engine.total + MIN_ROWS * config.data.max_length * count_kv_token_bytes(rollout, sizes)
    share = max(COMFORTABLE - beside / capacity, min(COMFORTABLE, needed / capacity))
    return math.floor(100 * share) / 100


def _describe_kv_cache_shortage(config: Config, weights: int, needed: int, share: float, capacity: int) -> str:
    """Return why an engine's KV cache certainly cannot hold one sequence, or "" if it may.

    Args:
        weights: bytes of the engine's weights.
        needed: bytes of one sequence in the cache.
        share: share of a GPU with `capacity` bytes that the engine may use; 0: on a CPU.
    """
    rollout, given = config.actor_rollout_ref.rollout, share * capacity
    cache = rollout.kv_cache_gib
    fits = weights + needed <= given if share else needed <= cache * GIB
    if fits or rollout.name != "vllm" or (share and not capacity):
        return ""
    row = f"{needed / GIB:.2f} GiB for a sequence of {config.data.max_length} tokens"
    row += " (data.max_prompt_length + data.max_response_length)"
    if not share:
        return f"actor_rollout_ref.rollout.kv_cache_gib={cache:g} is too small: an engine needs {row}"
    of_gpu = f"gpu_memory_utilization={share:g} of a GPU of {capacity / GIB:.0f} GiB is {given / GIB:.1f} GiB"
    return f"actor_rollout_ref.rollout.{of_gpu}, but an engine needs {weights / GIB:.1f} GiB for its weights and {row}"


def count_kv_token_bytes(rollout: Rollout, sizes: ModelSizes) -> int:
    """Return the bytes of a token in the KV cache of one tensor-parallel rank. Layers that keep only a window do not
    count."""
    size = sizes.cached_elements_per_token * get_dtype_bytes(rollout.dtype)
    return size // min(rollout.tensor_model_parallel_size, sizes.num_kv_heads)


def has_critic(config: Config) -> bool:
    return "values" in get_estimator(config.algorithm.adv_estimator).needs


def _count_imported_library_bytes(config: Config) -> int:
    """Return the bytes of imported libraries in all processes of a machine without GPUs, except the policy's ranks."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.controller == "local":
        return 0  # everything is in the policy's process
    ranks = trainer.n_gpus_per_node * (has_critic(config) + config.reward_model.enable)
    per_engine = 3 if rollout.name == "vllm" else 1  # worker; with vLLM also its engine core and fork server
    return (ranks + per_engine * (rollout.num_engines or 1) + 1) * RUNTIME["cpu"] + RAY  # 1: the driver


def _estimate_rank_memory_by_phase(config: Config, device: Device) -> tuple[dict[str, MemoryUsage], int, int]:
    """Plan the memory of a training rank, without engines. Returns the memory in each phase, the bytes offloaded to
    host memory, and the bytes of the copies from which checkpoints are written."""
    role, full_kl = config.actor_rollout_ref, config.actor_rollout_ref.actor.uses_full_kl
    divergence = (
        make_divergence(config.teacher) if config.teacher.uses_full_vocabulary else REVERSE if full_kl else None
    )
    steps = config.steps_per_iteration
    policy = _estimate_trained_model_memory(config, device, role.model, role.actor, steps, divergence)
    trained = {"policy": policy}
    if has_critic(config):
        own, steps = config.critic, config.num_mini_batches * config.critic.ppo_epochs
        trained["critic"] = _estimate_trained_model_memory(
            config, device, make_critic_model_section(role.model, own), own, steps, computes_logits=False
        )
    further = FURTHER_PROCESS * (has_critic(config) + config.reward_model.enable) if device == "cuda" else 0
    fixed = MemoryUsage(runtime=RUNTIME[device] + further)
    reference, teachers = FrozenModelMemory(), list[FrozenModelMemory]()
    if config.reward_model.enable:
        scorer = config.reward_model.model
        model = role.model.model_copy(update={"path": scorer.path})
        fixed += plan_frozen_model(model, scorer.fsdp_config, config.trainer.num_ranks, device).idle
    if config.needs_reference and not policy.num_lora_parameters:
        reference = plan_frozen_model(role.model, role.ref.fsdp_config, policy.shards, device)
    idle, in_update = reference.idle, reference.loaded if full_kl else reference.idle

    def sum_idle_memory(active_role: str, frozen: MemoryUsage) -> MemoryUsage:
        return sum((model.usage_while_idle() for name, model in trained.items() if name != active_role), fixed + frozen)

    phases: dict[str, MemoryUsage] = {}
    passes: list[MemoryUsage] = []
    for model, teacher in _estimate_teacher_memory(config, policy.shards, device):
        head, forward = _plan_teacher_head_and_forward(config, model)
        idle += teacher.idle
        if config.teacher.uses_full_vocabulary:  # its head stays gathered in the policy's update
            in_update += teacher.loaded + head
        else:
            in_update += teacher.idle
            forward += head if teacher.idle == teacher.loaded else head + teacher.loaded
        teachers.append(teacher)
        passes.append(forward)
    if passes:  # teachers compute one after the other
        forward = max(passes, key=lambda usage: usage.total)
        phases["the teacher's pass"] = policy.usage_after_step() + forward + sum_idle_memory("policy", in_update)
    for name, one in trained.items():
        beside = sum_idle_memory(name, in_update if name == "policy" else idle)
        phases |= {f"update of the {name}, {phase}": used + beside for phase, used in one.usage_during_update().items()}
    buckets = MemoryUsage(transfer_buckets=_count_weight_sync_bytes(policy, get_dtype_bytes(role.rollout.dtype)))
    phases["publish"] = policy.usage_after_step() + sum_idle_memory("policy", in_update) + buckets
    phases["generate"] = sum_idle_memory("", idle)
    offloaded = sum(one.offloaded_bytes() for one in trained.values())
    offloaded += sum(one.loaded.total - one.idle.total for one in (reference, *teachers))
    copies = sum(one.checkpoint_bytes() for one in trained.values())
    if config.algorithm.reference_reset.every or config.algorithm.reference_reset.patience:
        copies += count_frozen_bytes(policy.sizes, policy.shards, get_dtype_bytes(role.model.dtype))
    copies += teachers[0].loaded.frozen_models if config.teacher.uses_self_teacher and not role.model.lora_rank else 0
    return phases, offloaded, copies


def _estimate_teacher_memory(config: Config, shards: int, device: Device) -> list[tuple[Model, FrozenModelMemory]]:
    """Return model section and memory of each teacher on the ranks. A self-teacher has the policy's float32 weights."""
    policy, teacher = config.actor_rollout_ref.model, config.teacher
    if teacher.uses_self_teacher:
        width = get_dtype_bytes(policy.dtype if policy.lora_rank else "float32")
        return [(policy, plan_frozen_model(policy, config.actor_rollout_ref.actor.fsdp_config, shards, device, width))]
    return [
        (model, plan_frozen_model(model, teacher.local_models[key].fsdp_config, shards, device))
        for key, model in make_teacher_model_sections(policy, teacher).items()
    ]


def _plan_teacher_head_and_forward(config: Config, model: Model) -> tuple[MemoryUsage, MemoryUsage]:
    """Return the memory of the teacher's output head, gathered from all ranks, and of the rest of its forward pass."""
    sizes, width = load_model_sizes(model), get_dtype_bytes(model.dtype)
    rows, length = find_micro_batch_shape(config, config.max_teacher_length)
    layers = MemoryUsage(
        gathered_layers=2 * width * sizes.layer_parameters, activations=measure_forward_bytes(model, rows * length)
    )
    return MemoryUsage(gathered_layers=width * sizes.root_parameters), layers


def _estimate_trained_model_memory(
    config: Config,
    device: Device,
    model: Model,
    role: Actor | Critic,
    steps: int,
    divergence: Divergence | None = None,
    computes_logits: bool = True,
) -> TrainedModelMemory:
    """Estimate the memory of the policy or the critic on one rank. steps: optimizer steps per update. With shared
    prompts, this includes the copies of a prompt's keys and values that attention makes for each sample, assuming
    prompts of maximum length and responses of a quarter of the maximum length."""
    (rows, length), fsdp = find_micro_batch_shape(config), role.fsdp_config
    trained = plan_trained_model(
        model,
        fsdp,
        device,
        config.trainer.num_ranks,
        (rows, length),
        config.data.max_prompt_length,
        computes_logits,
        divergence,
    )
    trained = replace(
        trained,
        optimizer=role.optim.name,
        offload_weights=fsdp.param_offload and device == "cuda",
        has_one_step_per_update=steps == 1,
    )
    if config.actor_rollout_ref.actor.use_prefix_grouper is False:
        return trained
    samples, layers = config.group_size, trained.sizes.num_layers
    prompt, response = config.data.max_prompt_length, max(1, config.data.max_response_length // 4)
    copies = samples * (prompt + response) / (prompt + samples * response) - 1
    of_layer = int(copies * rows * length * trained.sizes.kv_elements_per_token * trained.dtype_bytes / layers)
    own = trained.activations
    if model.enable_gradient_checkpointing:
        return replace(trained, activations=replace(own, layer_peak=own.layer_peak + of_layer))
    return replace(trained, activations=replace(own, saved=own.saved + of_layer * layers))


def find_micro_batch_shape(config: Config, longest_row: int | None = None) -> tuple[int, int]:
    """Return (rows, tokens per row) of the largest micro-batch on a rank. longest_row: None = data.max_length."""
    data, actor = config.data, config.actor_rollout_ref.actor
    return compute_micro_batch_shape(
        longest_row=longest_row or data.max_length,
        rows_per_step=min(actor.ppo_mini_batch_size, config.trajectories_per_update),
        max_tokens=get_resolved(actor.ppo_max_token_len_per_gpu),
        num_ranks=config.trainer.num_ranks,
        sequence_parallel_size=actor.ulysses_sequence_parallel_size,
    )


def _estimate_engine_memory(config: Config, device: Device) -> MemoryUsage:
    """Estimate an engine's memory, without KV cache and CUDA context."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name == "fake":
        return MemoryUsage()
    sizes, parallel = load_model_sizes(model), rollout.tensor_model_parallel_size
    weights = MemoryUsage(engine_weights=get_dtype_bytes(rollout.dtype) * sizes.parameters // parallel)
    if device == "cpu":
        return weights
    tokens = max(rollout.max_num_batched_tokens, config.data.max_length)
    # float32 logits, and a copy to sample from
    logits = 2 * FLOAT32 * get_resolved(rollout.max_num_seqs) * (sizes.head_parameters // sizes.hidden_size)
    activations = measure_forward_bytes(model, tokens) // parallel
    return weights + MemoryUsage(engine_buffers=activations + logits)


def _estimate_sleeping_engine_memory(rollout: Rollout) -> MemoryUsage:
    return MemoryUsage(engine_buffers=SLEEPING_ENGINE if rollout.name == "vllm" else 0)


def _estimate_receiving_engine_memory(rollout: Rollout, sizes: ModelSizes, weights: int) -> MemoryUsage:
    """Estimate what an engine needs in a weight sync: its weights, and copies of a bucket and of a layer."""
    size, parallel = get_dtype_bytes(rollout.dtype), rollout.tensor_model_parallel_size
    layer = size * max(sizes.layer_parameters, sizes.head_parameters) // parallel
    return MemoryUsage(engine_weights=weights, engine_buffers=layer + get_largest_bucket_bytes(weights * parallel))


def _count_weight_sync_bytes(policy: TrainedModelMemory, dtype_bytes: int) -> int:
    """Return the bytes that a weight sync needs on a training rank: a bucket, its packed copy, the next bucket, and one
    gathered layer."""
    sizes, total = policy.sizes, dtype_bytes * policy.sizes.parameters
    full = min(total, get_largest_bucket_bytes(total) + dtype_bytes * sizes.head_parameters)
    return dtype_bytes * max(sizes.layer_parameters, sizes.root_parameters) + 3 * full
