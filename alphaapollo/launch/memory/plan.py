"""Plan the memory of an RL run: bytes on a GPU, or on a machine without GPUs, in each phase of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.divergence import REVERSE, Divergence, make_divergence
from alphaapollo.config.keys import format_value, replace_value
from alphaapollo.config.schema import Config, Model, RoleFsdp, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.builders import make_critic_model_section, make_teacher_model_section
from alphaapollo.launch.memory.model import (
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
from alphaapollo.weight_sync.buckets import BUCKET_BYTES

GIB = 2**30
RUNTIME = {"cuda": GIB, "cpu": GIB * 6 // 10}  # bytes per process: CUDA context and NCCL buffers, or imported libraries
RAY = GIB * 9 // 10  # bytes of Ray's processes on a node
COMFORTABLE = 0.9  # usable share of a device, because of fragmentation
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
DEFAULT_CACHE = Rollout().kv_cache_gib
ACTOR, ROLLOUT, BUDGET = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "ppo_max_token_len_per_gpu"
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
    kv_cache_tokens: int  # capacity of an engine's KV cache
    offloaded_bytes: int = 0  # bytes that GPUs offload to a node's host memory
    checkpoint_copy_bytes: int = 0  # bytes of the copies, in a node's host memory, from which checkpoints are written
    saves_in_background: bool = True  # whether these copies fit into memory
    problem: str = ""  # why the run cannot fit, and the keys that reduce memory; "": it fits

    @property
    def peak(self) -> tuple[str, MemoryUsage]:
        """Phase with the most memory, and its memory."""
        return max(self.usage_by_phase.items(), key=lambda item: item[1].total)

    @property
    def fits(self) -> bool:
        return not self.capacity or self.peak[1].total <= self.capacity

    @property
    def has_headroom(self) -> bool:
        return not self.capacity or self.peak[1].total <= COMFORTABLE * self.capacity

    def mark_as_too_large(self, advice: str) -> MemoryPlan:
        """Return a copy with the `problem` that the peak does not fit. advice: sentence with the suggested fix."""
        phase, usage = self.peak
        largest = sorted(usage.to_dict().items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{kind.replace('_', ' ')} {size / GIB:.1f}" for kind, size in largest)
        needed = f"memory: {usage.total / GIB:.1f} GiB are needed on {self.device_name} at its peak ({phase}: {parts})."
        return replace(self, problem=f"{needed} {advice}")

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
    engine = _estimate_engine_memory(config, device, capacity)
    phases, offloaded, copies = _estimate_rank_memory_by_phase(config, device)
    copies *= trainer.n_gpus_per_node if trainer.save_freq > 0 or trainer.record_steps else 0
    kv_token_bytes = (
        sizes.kv_elements_per_token
        * get_dtype_bytes(rollout.dtype)
        // min(rollout.tensor_model_parallel_size, sizes.num_kv_heads)
    )
    kv_cache_tokens = engine.kv_cache // kv_token_bytes
    if device == "cpu":
        shared = engine * (rollout.num_engines or 1) + MemoryUsage(runtime=_count_imported_library_bytes(config))
        node = {name: usage * trainer.n_gpus_per_node + shared for name, usage in phases.items()}
        return MemoryPlan(node, capacity, "this machine", kv_cache_tokens, checkpoint_copy_bytes=copies)
    if not rollout.colocate:
        del phases["generate"]
        phases["generate (an engine's GPU)"] = engine
    elif rollout.free_cache_engine:
        phases["publish"] += MemoryUsage(engine=_count_engine_weight_bytes(config))
        phases["generate"] += engine
    else:
        phases = {name: usage + engine for name, usage in phases.items()}
    device_name = f"a GPU of {capacity / GIB:.0f} GiB" if capacity else "a GPU"
    return MemoryPlan(phases, capacity, device_name, kv_cache_tokens, offloaded * trainer.n_gpus_per_node, copies)


def _has_critic(config: Config) -> bool:
    return "values" in get_estimator(config.algorithm.adv_estimator).needs


def _count_imported_library_bytes(config: Config) -> int:
    """Return the bytes of imported libraries in all processes of a machine without GPUs, except the policy's ranks."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.controller == "local":
        return 0  # everything is in the policy's process
    ranks = trainer.n_gpus_per_node * (_has_critic(config) + config.reward_model.enable)
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
    policy = _estimate_trained_model_memory(config, device, role.model, role.actor.fsdp_config, steps, divergence)
    trained = {"policy": policy}
    if _has_critic(config):
        own, steps = config.critic, config.num_mini_batches * config.critic.ppo_epochs
        trained["critic"] = _estimate_trained_model_memory(
            config, device, make_critic_model_section(role.model, own), own.fsdp_config, steps, computes_logits=False
        )
    fixed, reference, teacher = MemoryUsage(runtime=RUNTIME[device]), FrozenModelMemory(), FrozenModelMemory()
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
    if config.teacher.divergence:
        model = make_teacher_model_section(role.model, config.teacher)
        teacher = plan_frozen_model(model, config.teacher.model.fsdp_config, policy.shards, device)
        head, forward = _plan_teacher_head_and_forward(config, model)
        idle += teacher.idle
        if config.teacher.uses_full_vocabulary:  # its head stays gathered in the policy's update
            in_update += teacher.loaded + head
        else:
            in_update += teacher.idle
            forward += head if teacher.idle == teacher.loaded else head + teacher.loaded
        phases["the teacher's pass"] = policy.usage_after_step() + forward + sum_idle_memory("policy", in_update)
    for name, one in trained.items():
        beside = sum_idle_memory(name, in_update if name == "policy" else idle)
        phases |= {f"update of the {name}, {phase}": used + beside for phase, used in one.usage_during_update().items()}
    buckets = MemoryUsage(transfer_buckets=_count_weight_sync_bytes(policy, get_dtype_bytes(role.rollout.dtype)))
    phases["publish"] = policy.usage_after_step() + sum_idle_memory("policy", in_update) + buckets
    phases["generate"] = sum_idle_memory("", idle)
    offloaded = sum(one.offloaded_bytes() for one in trained.values())
    offloaded += sum(one.loaded.total - one.idle.total for one in (reference, teacher))
    copies = sum(one.checkpoint_bytes() for one in trained.values())
    if config.algorithm.reference_reset.every or config.algorithm.reference_reset.patience:
        copies += count_frozen_bytes(policy.sizes, policy.shards, get_dtype_bytes(role.model.dtype))
    return phases, offloaded, copies


def _plan_teacher_head_and_forward(config: Config, model: Model) -> tuple[MemoryUsage, MemoryUsage]:
    """Return the memory of the teacher's output head, gathered from all ranks, and of the rest of its forward pass."""
    sizes, width, (rows, length) = load_model_sizes(model), get_dtype_bytes(model.dtype), find_micro_batch_shape(config)
    layers = MemoryUsage(
        gathered_layers=2 * width * sizes.layer_parameters, activations=measure_forward_bytes(model, rows * length)
    )
    return MemoryUsage(gathered_layers=width * sizes.root_parameters), layers


def _estimate_trained_model_memory(
    config: Config,
    device: Device,
    model: Model,
    fsdp: RoleFsdp,
    steps: int,
    divergence: Divergence | None = None,
    computes_logits: bool = True,
) -> TrainedModelMemory:
    """Estimate the memory of the policy or the critic on one rank. steps: optimizer steps per update. With shared
    prompts, this includes the copies of a prompt's keys and values that attention makes for each sample, assuming
    prompts of maximum length and responses of a quarter of the maximum length."""
    rows, length = find_micro_batch_shape(config)
    trained = plan_trained_model(
        model, fsdp, device, config.trainer.num_ranks, (rows, length), computes_logits, divergence
    )
    trained = replace(
        trained, offload_weights=fsdp.param_offload and device == "cuda", has_one_step_per_update=steps == 1
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


def find_micro_batch_shape(config: Config) -> tuple[int, int]:
    """Return (rows, tokens per row) of the largest micro-batch on a rank."""
    data, actor = config.data, config.actor_rollout_ref.actor
    return compute_micro_batch_shape(
        longest_row=data.max_length,
        rows_per_step=min(actor.ppo_mini_batch_size, config.trajectories_per_batch),
        max_tokens=actor.ppo_max_token_len_per_gpu,
        num_ranks=config.trainer.num_ranks,
        sequence_parallel_size=actor.ulysses_sequence_parallel_size,
    )


def _count_engine_weight_bytes(config: Config) -> int:
    role = config.actor_rollout_ref
    size = get_dtype_bytes(role.rollout.dtype) * load_model_sizes(role.model).parameters
    return 0 if role.rollout.name == "fake" else size // role.rollout.tensor_model_parallel_size


def _estimate_engine_memory(config: Config, device: Device, capacity: int) -> MemoryUsage:
    """Estimate an engine's memory. On a GPU, its KV cache fills up rollout.gpu_memory_utilization * capacity."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    weights = _count_engine_weight_bytes(config)
    if rollout.name == "fake":
        return MemoryUsage()
    if device == "cpu":
        return MemoryUsage(engine=weights, kv_cache=int(rollout.kv_cache_gib * GIB) if rollout.name == "vllm" else 0)
    sizes = load_model_sizes(model)
    tokens = max(rollout.max_num_batched_tokens, config.data.max_length)
    # float32 logits, and a copy to sample from
    logits = 2 * 4 * rollout.max_num_seqs * (sizes.head_parameters // sizes.hidden_size)
    used = weights + measure_forward_bytes(model, tokens) // rollout.tensor_model_parallel_size + logits
    return MemoryUsage(engine=used, kv_cache=max(0, int(rollout.gpu_memory_utilization * capacity) - used))


def _count_weight_sync_bytes(policy: TrainedModelMemory, dtype_bytes: int) -> int:
    """Return the bytes that a weight sync needs on a training rank: a bucket of about BUCKET_BYTES, its packed copy,
    the next bucket, and one gathered layer."""
    sizes = policy.sizes
    full = min(dtype_bytes * sizes.parameters, BUCKET_BYTES + dtype_bytes * sizes.head_parameters)
    return dtype_bytes * max(sizes.layer_parameters, sizes.root_parameters) + 3 * full


def fit_config_to_memory(
    config: Config, device: Device, capacity: int, is_gradient_checkpointing_auto: bool, host_memory: int = 0
) -> tuple[Config, MemoryPlan]:
    """Plan the memory of an RL run, and enable gradient checkpointing if it is `auto` and needed. Returns the
    configuration and the plan, whose `problem` is set if the run cannot fit.

    capacity: as for plan_memory. host_memory: bytes of host memory of a GPU node; 0: unknown.
    """
    plan = plan_memory(config, device, capacity)
    if is_gradient_checkpointing_auto and not plan.has_headroom:
        config = replace_values(config, {CHECKPOINTING: True})
        plan = plan_memory(config, device, capacity)
    if device == "cpu" and (problem := _explain_small_kv_cache(config, plan)):
        return config, replace(plan, problem=problem)
    if not plan.fits:
        return config, plan.mark_as_too_large(_suggest_memory_settings(config, device, capacity))
    if host_memory and plan.offloaded_bytes > host_memory:
        problem = (
            f"memory: offloading needs {plan.offloaded_bytes / GIB:.0f} GiB of host memory per node, but a node has "
            f"{host_memory / GIB:.0f} GiB. Unset some of the offload keys of fsdp_config, or raise trainer.nnodes."
        )
        return config, replace(plan, problem=problem)
    return config, plan.add_checkpoint_copies(device, host_memory)


def _explain_small_kv_cache(config: Config, plan: MemoryPlan) -> str:
    """Return why an engine's KV cache is too small for one sequence, or "" if it is large enough."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_length
    if rollout.name != "vllm" or plan.kv_cache_tokens >= longest:
        return ""
    return (
        f"{ROLLOUT}.kv_cache_gib={rollout.kv_cache_gib:g} has room for {plan.kv_cache_tokens} tokens, but a sequence "
        f"can have {longest} (data.max_prompt_length + data.max_response_length). Raise kv_cache_gib, or lower these "
        "lengths."
    )


def _suggest_memory_settings(config: Config, device: Device, capacity: int) -> str:
    keys = find_cheapest_memory_settings(config, device, capacity, lambda plan: plan.fits)
    if keys is None:
        unit = "GPUs" if device == "cuda" else "machines"
        return f"No setting makes the run fit on this number of {unit}. Raise trainer.nnodes."
    return f"Set {' '.join(f'{key}={format_value(value)}' for key, value in keys.items())}."


def find_cheapest_memory_settings(
    config: Config, device: Device, capacity: int, is_acceptable: Callable[[MemoryPlan], bool]
) -> dict[str, object] | None:
    """Return the settings {key: value} that cost the least time among those whose memory plan satisfies
    `is_acceptable`, or None if no settings do."""

    def is_plan_acceptable_with(settings: Mapping[str, object]) -> bool:
        return is_acceptable(plan_memory(replace_values(config, settings), device, capacity))

    keys: dict[str, object] = {}
    options = list_memory_saving_keys(config, device)
    while not is_plan_acceptable_with(keys):
        option = next(options, None)
        if option is None:
            return None
        keys[option[0]] = option[1]
    for key in reversed(list(keys)):
        fewer = {other: value for other, value in keys.items() if other != key}
        keys = fewer if is_plan_acceptable_with(fewer) else keys
    return keys


def list_memory_saving_keys(config: Config, device: Device) -> Iterator[tuple[str, object]]:
    """Yield the settings (key, value) that save memory. Settings that cost the least time come first."""
    role, data = config.actor_rollout_ref, config.data
    if not role.model.enable_gradient_checkpointing:
        yield CHECKPOINTING, True
    trained = [ACTOR, *["critic"] * _has_critic(config)]
    if device == "cuda":
        yield from ((f"{section}.fsdp_config.optimizer_offload", True) for section in trained)
        if config.needs_reference:
            yield "actor_rollout_ref.ref.fsdp_config.param_offload", True
        if config.teacher.divergence:
            yield "teacher.model.fsdp_config.param_offload", True
    longest, budget = data.max_length, role.actor.ppo_max_token_len_per_gpu
    while budget > longest:
        budget = max(longest, budget // 2)
        yield f"{ACTOR}.{BUDGET}", budget
    if device == "cpu":
        if role.rollout.kv_cache_gib > DEFAULT_CACHE:
            yield f"{ROLLOUT}.kv_cache_gib", DEFAULT_CACHE
        return
    if role.rollout.gpu_memory_utilization > 0.3:
        yield f"{ROLLOUT}.gpu_memory_utilization", 0.3
    for key in ("param_offload", "offload_policy"):
        yield from ((f"{section}.fsdp_config.{key}", True) for section in trained)


def replace_values(config: Config, values: Mapping[str, object]) -> Config:
    """Return the configuration with the values of dotted keys replaced, e.g. {"trainer.seed": 1}."""
    for key, value in values.items():
        config = replace_value(config, key, value)
    return config
