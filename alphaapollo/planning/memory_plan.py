"""Plan the memory of a run before it starts: bytes on a GPU, or on a machine without GPUs, in each phase."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.resolve import get_resolved, resolve_controller
from alphaapollo.config.schema import Config, Model, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.model import FrozenFsdp, Fsdp
from alphaapollo.models.activation_memory import ModelSizes
from alphaapollo.planning.memory import (
    DIVERGENCE_COPIES,
    FLOAT32,
    GIB,
    LOGIT_COPIES,
    Usage,
    compute_micro_batch_shape,
    count_frozen_bytes,
    estimate_idle,
    estimate_state,
    estimate_update,
    get_dtype_bytes,
    load_model_sizes,
    make_trained_model,
    measure_pass,
)
from alphaapollo.weight_sync.shared_memory import get_largest_bucket_bytes
from alphaapollo.workers.builders import make_critic_model_section, make_teacher_model_sections

PROCESS = {"cuda": GIB, "cpu": GIB * 6 // 10}  # CUDA context and NCCL buffers, or imported libraries
FURTHER_PROCESS = GIB * 6 // 10  # each further process on a GPU
SLEEPING_ENGINE = GIB * 5 // 2  # CUDA context, NCCL and tensor-parallel buffers of an engine that sleeps
RAY = GIB * 9 // 10  # processes of Ray on a node
USABLE = 0.9  # share of a device, because of fragmentation
DEFAULT_ENGINE_SHARE = 0.5  # of a GPU of unknown size
MIN_ROWS = 8  # sequences of maximum length for which an engine should have KV cache
CERTAIN_KINDS = ("weights", "gradients", "optimizer", "frozen models", "engine weights", "kv cache")
UPDATE, FROZEN_PASS = "update", "frozen models compute"  # beginnings of names of phases


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory of one GPU, or of a machine without GPUs, in each phase of an iteration."""

    phases: dict[str, Usage]
    capacity: int  # bytes; 0: unknown
    device_name: str  # description of the device in messages
    engine_share: float = 0.0  # share of a GPU that an engine may use
    kv_cache_tokens: int = 0  # capacity of an engine's KV cache
    spare_kv_cache: int = 0  # bytes of the cache that the run could do without
    kv_cache_shortage: str = ""  # why the cache certainly cannot hold one sequence; "": it may
    offloaded_bytes: int = 0  # bytes that GPUs offload to a node's host memory
    checkpoint_copy_bytes: int = 0  # bytes of the copies, in a node's host memory, from which checkpoints are written
    saves_in_background: bool = True  # whether these copies fit into memory
    problem: str = ""  # why the run certainly does not fit, and the keys that reduce memory; "": it may fit
    warning: str = ""  # why the run may not fit, and the keys that reduce memory; "": it fits as far as is known

    @property
    def peak(self) -> tuple[str, Usage]:
        """Phase with the most memory, and its memory."""
        return max(self.phases.items(), key=lambda item: item[1].total())

    @property
    def certain(self) -> MemoryPlan:
        """The plan with only those kinds of memory that are known exactly and cannot be reduced."""
        spare = Usage({"kv cache": self.spare_kv_cache})
        certain = {name: Usage({kind: usage[kind] for kind in CERTAIN_KINDS}) for name, usage in self.phases.items()}
        return replace(self, phases={name: usage - spare for name, usage in certain.items()})

    @property
    def is_possible(self) -> bool:
        """Whether the kinds of memory that are known exactly fit."""
        return not self.kv_cache_shortage and (not self.capacity or self.certain.peak[1].total() <= self.capacity)

    @property
    def has_headroom(self) -> bool:
        """Whether the estimate leaves at least 10 % free, for fragmentation."""
        return self.is_possible and (not self.capacity or self.peak[1].total() <= USABLE * self.capacity)

    @property
    def has_headroom_in_update(self) -> bool:
        """Whether the phases have headroom whose memory depends on the micro-batches."""
        phases = {name: usage for name, usage in self.phases.items() if name.startswith((UPDATE, FROZEN_PASS))}
        return replace(self, phases=phases, kv_cache_shortage="").has_headroom

    def describe_peak(self, accuracy: str) -> str:
        phase, usage = self.peak
        parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in usage.most_common(3))
        needed = f"{accuracy} {usage.total() / GIB:.1f} GiB are needed on {self.device_name}"
        return f"memory: {needed} at its peak ({phase}: {parts})"


@dataclass(frozen=True)
class MemoryRequest:
    """Properties of a fine-tuning task that determine its memory."""

    longest_row: int  # number of tokens of the longest row (token sequence)
    rows_per_example: int = 1  # e.g. 2 for pairs; the rows of an example stay in one micro-batch
    computes_logits: bool = True  # True: log-probs over the vocabulary; False: one number per row


def _plan_finetuning(config: TuningConfig, device: Device, capacity: int, request: MemoryRequest) -> MemoryPlan:
    trainer, model, data = config.trainer, config.model, config.data
    examples, tokens = compute_micro_batch_shape(
        longest_row=request.longest_row * request.rows_per_example,
        rows_per_step=data.train_batch_size,
        max_tokens=get_resolved(data.max_token_len_per_gpu),
        num_ranks=trainer.num_ranks,
        sequence_parallel_size=config.ulysses_sequence_parallel_size,
    )
    shape = examples * request.rows_per_example, max(1, tokens // request.rows_per_example)
    copies = LOGIT_COPIES * request.computes_logits
    trained = make_trained_model(
        model, config.fsdp_config, device, trainer.num_ranks, shape, shape[1], copies, config.optim.name
    )
    phases = {UPDATE: estimate_update(trained) + Usage({"runtime": PROCESS[device]})}
    ranks = trainer.n_gpus_per_node
    written = trained.checkpoint_bytes * ranks if trainer.save_freq > 0 else 0
    if device == "cuda":
        return MemoryPlan(
            phases, capacity, "a GPU", offloaded_bytes=trained.offloaded_bytes * ranks, checkpoint_copy_bytes=written
        )
    driver = Usage({"runtime": (PROCESS["cpu"] + RAY) * (resolve_controller(trainer) == "ray")})
    node = {name: _multiply(usage, ranks) + driver for name, usage in phases.items()}
    return MemoryPlan(node, capacity, "this machine", checkpoint_copy_bytes=written)


def _multiply(usage: Usage, count: int) -> Usage:
    return Usage({kind: size * count for kind, size in usage.items()})


def plan_memory(
    config: Config | TuningConfig, device: Device, capacity: int, request: MemoryRequest | None = None
) -> MemoryPlan:
    """Plan the memory of a checked configuration with resolved `model` and `rollout` sections.

    capacity: bytes of one GPU, or of the machine for training on a CPU; 0: unknown. request: of fine-tuning.
    """
    if not isinstance(config, Config):
        assert request is not None
        return _plan_finetuning(config, device, capacity, request)
    role, trainer = config.actor_rollout_ref, config.trainer
    rollout, ranks = role.rollout, trainer.n_gpus_per_node
    phases, offloaded, written = _estimate_ranks(config, device)
    engine, token_bytes = _estimate_engine(config, device), count_kv_token_bytes(config)
    asleep = Usage({"engine buffers": SLEEPING_ENGINE * (rollout.name == "vllm" and device == "cuda")})
    share = _get_engine_share(config, phases, engine, capacity) if device == "cuda" else 0
    cache = int(share * capacity) - engine.total() if share else int(rollout.kv_cache_gib * GIB)
    engine["kv cache"] = max(0, cache) if rollout.name == "vllm" else 0
    row = config.data.max_length * token_bytes
    spare = max(0, engine["kv cache"] - row) if share and rollout.gpu_memory_utilization == "auto" else 0
    shortage = _describe_kv_cache_shortage(config, engine["engine weights"], row, share, capacity)
    plan = MemoryPlan(
        phases,
        capacity,
        f"a GPU of {capacity / GIB:.0f} GiB" if capacity else "a GPU",
        share,
        engine["kv cache"] // token_bytes,
        spare,
        shortage,
        offloaded * ranks,
        written * ranks if trainer.save_freq > 0 or trainer.record_steps else 0,
    )
    if device == "cpu":
        others = ranks * (has_critic(config) + config.reward_model.enable)
        others += (3 if rollout.name == "vllm" else 1) * (rollout.num_engines or 1) + 1  # vLLM: 3 processes; the driver
        libraries = {"runtime": (others * PROCESS["cpu"] + RAY) * (trainer.controller != "local")}
        shared = _multiply(engine, rollout.num_engines or 1) + Usage(libraries)
        node = {name: _multiply(usage, ranks) + shared for name, usage in phases.items()}
        return replace(plan, phases=node, device_name="this machine")
    if not rollout.colocate:
        return replace(
            plan,
            phases={name: usage for name, usage in phases.items() if name != "generate"}
            | {"generate (an engine's GPU)": engine + asleep},
        )
    sleeps = rollout.free_cache_engine
    phases = {
        name: usage + asleep + (Usage() if sleeps and name != "generate" else engine) for name, usage in phases.items()
    }
    if sleeps:
        received = _count_bucket(load_model_sizes(role.model), get_dtype_bytes(rollout.dtype))
        phases["publish"] += Usage({"engine weights": engine["engine weights"], "engine buffers": received})
    return replace(plan, phases=phases)


def _estimate_ranks(config: Config, device: Device) -> tuple[dict[str, Usage], int, int]:
    """Estimate the memory of a training rank, without engines. Returns the memory in each phase, the bytes offloaded to
    host memory, and the bytes of the copies from which checkpoints are written."""
    role, critic, prompt = config.actor_rollout_ref, config.critic, config.data.max_prompt_length
    computes_divergence = role.actor.uses_full_kl or config.teacher.uses_full_vocabulary
    sizes = device, config.trainer.num_ranks, find_micro_batch_shape(config), prompt
    copies, actor = DIVERGENCE_COPIES if computes_divergence else LOGIT_COPIES, role.actor
    policy = make_trained_model(
        role.model, actor.fsdp_config, *sizes, copies, actor.optim.name, config.steps_per_iteration
    )
    trained = [policy]
    if has_critic(config):
        steps, model = config.num_mini_batches * critic.ppo_epochs, make_critic_model_section(role.model, critic)
        trained.append(make_trained_model(model, critic.fsdp_config, *sizes, 0, critic.optim.name, steps))
    further = FURTHER_PROCESS * (has_critic(config) + config.reward_model.enable) * (device == "cuda")
    fixed = Usage({"runtime": PROCESS[device] + further})
    if config.reward_model.enable:
        scorer = config.reward_model.model
        section = role.model.model_copy(update={"path": scorer.path})
        fixed += _estimate_frozen(section, scorer.fsdp_config, config.trainer.num_ranks, device)[1]
    frozen = _list_frozen_models(config, policy.shards, device)
    idle = sum((one for _, _, one in frozen), fixed)
    # frozen models, and the gathered heads of teachers, whose distributions the policy's update reads
    in_update = sum((loaded for _, loaded, _ in frozen), fixed) if computes_divergence else idle
    for model in make_teacher_model_sections(role.model, config.teacher).values() if computes_divergence else ():
        in_update += Usage({"gathered layers": get_dtype_bytes(model.dtype) * load_model_sizes(model).root_parameters})
    critics = sum((estimate_idle(one) for one in trained[1:]), Usage())
    phases = {f"{UPDATE} of the policy": estimate_update(policy) + critics + in_update}
    for one in trained[1:]:
        phases[f"{UPDATE} of the critic"] = estimate_update(one) + estimate_idle(policy) + idle
    rows, length = find_micro_batch_shape(config, config.max_teacher_length)
    passes = [loaded - away + measure_pass(model, rows * length) for model, loaded, away in frozen]
    if passes:  # one after the other
        phases[FROZEN_PASS] = estimate_state(policy) + critics + idle + max(passes, key=Usage.total)
    width = get_dtype_bytes(role.rollout.dtype)
    sent = 3 * _count_bucket(policy.sizes, width)  # with a packed copy, and the next one; from a gathered layer
    sent += width * max(policy.sizes.layer_parameters, policy.sizes.root_parameters)
    phases["publish"] = estimate_state(policy) + critics + in_update + Usage({"transfer buckets": sent})
    phases["generate"] = estimate_idle(policy) + critics + idle
    offloaded = sum(one.offloaded_bytes for one in trained)
    offloaded += sum(loaded.total() - away.total() for _, loaded, away in frozen)
    written, reset = sum(one.checkpoint_bytes for one in trained), config.algorithm.reference_reset
    if reset.every or reset.patience or (config.teacher.uses_self_teacher and not role.model.lora_rank):
        written += sum(loaded.total() for _, loaded, _ in frozen)  # checkpoints have the moved reference or teacher
    return phases, offloaded, written


def _list_frozen_models(config: Config, shards: int, device: Device) -> list[tuple[Model, Usage, Usage]]:
    """Return reference and teachers on a rank, each with its memory while it computes and while it does not. With LoRA,
    the base model is the reference. A self-teacher has the policy's float32 weights."""
    role, teacher = config.actor_rollout_ref, config.teacher
    sections: list[tuple[Model, FrozenFsdp | Fsdp, str]] = []
    if config.needs_reference and not role.model.lora_rank:
        sections.append((role.model, role.ref.fsdp_config, ""))
    if teacher.uses_self_teacher:
        sections.append((role.model, role.actor.fsdp_config, "" if role.model.lora_rank else "float32"))
    for key, model in make_teacher_model_sections(role.model, teacher).items():
        sections.append((model, teacher.local_models[key].fsdp_config, ""))
    return [(model, *_estimate_frozen(model, fsdp, shards, device, dtype)) for model, fsdp, dtype in sections]


def _estimate_frozen(
    model: Model, fsdp: FrozenFsdp | Fsdp, shards: int, device: Device, dtype: str = ""
) -> tuple[Usage, Usage]:
    """Return the memory of a frozen model on one of `shards` ranks: while it computes, and while it does not. dtype: of
    its weights; "": the model's."""
    if fsdp.offload_policy and device == "cuda":
        return Usage(), Usage()
    loaded = Usage({"frozen models": count_frozen_bytes(model, shards, dtype or model.dtype)})
    return loaded, Usage() if getattr(fsdp, "param_offload", False) and device == "cuda" else loaded


def _get_engine_share(config: Config, phases: dict[str, Usage], engine: Usage, capacity: int) -> float:
    """Return rollout.gpu_memory_utilization or, if it is `auto`, the share of a GPU that training leaves to an engine,
    but at least what the engine needs for MIN_ROWS sequences.

    phases: memory of a training rank by phase. engine: memory of an engine without KV cache. capacity: bytes of a GPU;
    0: unknown.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.gpu_memory_utilization != "auto":
        return rollout.gpu_memory_utilization
    if not capacity:
        return DEFAULT_ENGINE_SHARE
    beside = [phases["generate"]] if rollout.free_cache_engine else phases.values()
    training = max(usage.total() for usage in beside) if rollout.colocate else 0
    asleep = SLEEPING_ENGINE * (rollout.name == "vllm")
    needed = engine.total() + MIN_ROWS * config.data.max_length * count_kv_token_bytes(config)
    share = max(USABLE - (training + asleep) / capacity, min(USABLE, needed / capacity))
    return math.floor(100 * share) / 100


def _describe_kv_cache_shortage(config: Config, weights: int, needed: int, share: float, capacity: int) -> str:
    """Return why an engine's KV cache certainly cannot hold one sequence, or "" if it may. share: of a GPU of
    `capacity` bytes; 0: on a CPU. weights and needed: bytes of the engine's weights, and of one sequence."""
    rollout, given = config.actor_rollout_ref.rollout, share * capacity
    fits = weights + needed <= given if share else needed <= rollout.kv_cache_gib * GIB
    if fits or rollout.name != "vllm" or (share and not capacity):
        return ""
    row = f"{needed / GIB:.2f} GiB for a sequence of {config.data.max_length} tokens"
    row += " (data.max_prompt_length + data.max_response_length)"
    if not share:
        return f"actor_rollout_ref.rollout.kv_cache_gib={rollout.kv_cache_gib:g} is too small: an engine needs {row}"
    of_gpu = f"gpu_memory_utilization={share:g} of a GPU of {capacity / GIB:.0f} GiB is {given / GIB:.1f} GiB"
    return f"actor_rollout_ref.rollout.{of_gpu}, but an engine needs {weights / GIB:.1f} GiB for its weights and {row}"


def count_kv_token_bytes(config: Config) -> int:
    """Return the bytes of a token in the KV cache of one tensor-parallel rank. Layers that keep only a window do not
    count."""
    rollout, sizes = config.actor_rollout_ref.rollout, load_model_sizes(config.actor_rollout_ref.model)
    size = sizes.kv_elements_per_token * get_dtype_bytes(rollout.dtype)
    return size // min(rollout.tensor_model_parallel_size, sizes.num_kv_heads)


def has_critic(config: Config) -> bool:
    return "values" in get_estimator(config.algorithm.adv_estimator).needs


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


def _estimate_engine(config: Config, device: Device) -> Usage:
    """Estimate an engine's memory, without KV cache and CUDA context."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name == "fake":
        return Usage()
    sizes, parallel = load_model_sizes(model), rollout.tensor_model_parallel_size
    weights = Usage({"engine weights": get_dtype_bytes(rollout.dtype) * sizes.parameters // parallel})
    if device == "cpu":
        return weights
    # float32 logits, and a copy to sample from
    logits = 2 * FLOAT32 * get_resolved(rollout.max_num_seqs) * (sizes.head_parameters // sizes.hidden_size)
    activations = measure_pass(model, max(rollout.max_num_batched_tokens, config.data.max_length))["activations"]
    return weights + Usage({"engine buffers": activations // parallel + logits})


def _count_bucket(sizes: ModelSizes, width: int) -> int:
    """Return the bytes of the largest bucket of a weight sync, which has at least one parameter."""
    return min(
        width * sizes.parameters, get_largest_bucket_bytes(width * sizes.parameters) + width * sizes.head_parameters
    )
