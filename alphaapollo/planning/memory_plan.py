"""Plan the memory of a run: bytes on a GPU, or on a machine without GPUs, in each phase of an iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.resolve import get_resolved, has_worker_processes, resolve_controller
from alphaapollo.config.schema import Actor, Config, Critic, Model, TuningConfig
from alphaapollo.config.schema.base import Device
from alphaapollo.planning.engine_memory import count_kv_token_bytes, estimate_engine
from alphaapollo.planning.model_memory import (
    DIVERGENCE_COPIES,
    FLOAT32,
    GIB,
    LOGIT_COPIES,
    RankModel,
    Usage,
    count_bucket_bytes,
    count_sent_bytes,
    estimate_idle,
    estimate_pass,
    estimate_update,
    get_dtype_bytes,
    load_model_sizes,
    make_frozen_model,
    make_rank_model,
)
from alphaapollo.workers.builders import make_critic_model_section, make_teacher_model_sections

PROCESS = {"cuda": GIB, "cpu": GIB * 6 // 10}  # CUDA context and NCCL buffers, or imported libraries
FURTHER_PROCESS = GIB * 6 // 10  # each process on a GPU besides the policy's: critic, reward model
SLEEPING_ENGINE = GIB * 5 // 2  # CUDA context, NCCL and tensor-parallel buffers of an engine that sleeps
RAY = GIB * 9 // 10  # processes of Ray on a node
USABLE = 0.9  # share of a device, because of fragmentation
DEFAULT_ENGINE_SHARE = 0.5  # of a GPU of unknown size
MIN_ROWS = 8  # sequences of maximum length for which an engine should have KV cache
CERTAIN_KINDS = ("weights", "gradients", "optimizer", "frozen models", "engine weights", "kv cache")
UPDATE = "update"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class MemoryRequest:
    """Properties of a fine-tuning task that determine its memory."""

    longest_row: int  # number of tokens of the longest row (token sequence)
    rows_per_example: int = 1  # e.g. 2 for pairs; the rows of an example stay in one micro-batch
    computes_logits: bool = True  # True: log-probs over the vocabulary; False: one number per row


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory of one GPU, or of a machine without GPUs, in each phase of an iteration."""

    phases: dict[str, Usage]
    capacity: int  # bytes; 0: unknown
    device_name: str  # description of the device in messages
    engine_share: float = 0.0  # share of a GPU that an engine may use
    kv_cache_tokens: int = 0  # capacity of an engine's KV cache
    spare_kv_cache: int = 0  # bytes of the cache that the run could do without
    offloaded_bytes: int = 0  # bytes of weights and optimizer state that GPUs offload to a node's host memory
    offloaded_activations: int = 0  # bytes of activations that GPUs offload to a node's host memory
    saved_activations: int = 0  # bytes that the policy's layers save on a GPU for the backward pass of a micro-batch
    checkpoint_copy_bytes: int = 0  # bytes of the copies, in a node's host memory, from which checkpoints are written
    saves_in_background: bool = True  # whether the copies for checkpoints fit into memory
    shards: int = 1  # ranks that share one copy of the trained model
    traffic_bytes: int = 0  # bytes that a rank receives per micro-batch from the ranks that share its copy
    frozen_parameters: int = 0  # of reference, teachers and reward model
    problem: str = ""  # why the run certainly does not fit, and the keys that reduce memory; "": it may fit
    warning: str = ""  # why the run may not fit, and the keys that reduce memory; "": it fits as far as is known

    @property
    def host_bytes(self) -> int:
        """Bytes that GPUs offload to a node's host memory."""
        return self.offloaded_bytes + self.offloaded_activations

    @property
    def peak(self) -> tuple[str, Usage]:
        """Phase with the most memory, and its memory."""
        return max(self.phases.items(), key=lambda item: item[1].total())

    @property
    def certain(self) -> MemoryPlan:
        """The plan with only those kinds of memory that are known exactly and cannot be reduced."""
        spare = Usage({"kv cache": self.spare_kv_cache})
        kinds = {name: Usage({kind: usage[kind] for kind in CERTAIN_KINDS}) for name, usage in self.phases.items()}
        return replace(self, phases={name: usage - spare for name, usage in kinds.items()})

    @property
    def is_possible(self) -> bool:
        """Whether the kinds of memory that are known exactly fit."""
        return not self.problem and (not self.capacity or self.certain.peak[1].total() <= self.capacity)

    @property
    def excess(self) -> float:
        """Bytes above 90 % of the device, summed over the phases; 10 % are for fragmentation. Unknown capacity: 0."""
        limit = USABLE * self.capacity or math.inf
        return sum(max(0.0, usage.total() - limit) for usage in self.phases.values())

    def describe_shortage(self) -> str:
        """Describe why the run cannot fit or, if the plan is possible, why it may not fit; "" if it has headroom."""
        if not self.is_possible:
            return self.problem or self.certain._describe_peak("at least", "")
        return self._describe_peak("about", ", so the run may end with an out-of-memory error") if self.excess else ""

    def _describe_peak(self, accuracy: str, risk: str) -> str:
        phase, usage = self.peak
        parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in usage.most_common(3))
        needed = f"memory: {accuracy} {usage.total() / GIB:.1f} GiB are needed on {self.device_name} at its peak"
        return f"{needed} ({phase}: {parts}){risk}."


def plan_memory(
    config: Config | TuningConfig, device: Device, capacity: int, request: MemoryRequest | None = None
) -> MemoryPlan:
    """Plan the memory of a checked configuration with resolved `model` and `rollout` sections.

    capacity: bytes of one GPU, or of the machine for training on a CPU; 0: unknown. request: None = data.max_length.
    """
    trainer, ranks = config.trainer, config.trainer.n_gpus_per_node
    trained = _make_rank_models(config, device, request or MemoryRequest(config.data.max_length))
    policy = next(iter(trained.values()))
    frozen = _make_frozen_models(config, device, policy.shards) if isinstance(config, Config) else []
    models = [*trained.values(), *frozen]
    num_further = len(trained) - 1 + int(isinstance(config, Config) and config.reward_model.enable)
    runtime = PROCESS[device] + (FURTHER_PROCESS * num_further if device == "cuda" else 0)
    idle = sum(map(estimate_idle, models), Usage(runtime=runtime))
    increases = {name: estimate_update(model) - estimate_idle(model) for name, model in trained.items()}
    has_processes = has_worker_processes(trainer)
    if device == "cpu" and has_processes:  # each process keeps the memory that its update has freed
        increases = dict.fromkeys(increases, sum(increases.values(), Usage()))
    phases = {name: idle + increase for name, increase in increases.items()}
    if isinstance(config, Config):
        phases = _add_phases(config, phases, idle, policy, frozen)
    copied = sum(FLOAT32 * -(-model.trained // model.shards) + model.state["optimizer"] for model in trained.values())
    if isinstance(config, Config) and _changes_frozen_models(config):
        copied += sum(model.state.total() for model in frozen if model.sizes is policy.sizes)
    if device == "cpu":
        libraries = (1 + ranks * num_further) * PROCESS["cpu"] if has_processes else 0  # driver, further processes
        libraries += RAY if resolve_controller(trainer) == "ray" else 0
        phases = {name: _multiply(usage, ranks) + Usage(runtime=libraries) for name, usage in phases.items()}
    records = any(getattr(trainer, key, None) for key in ("record_steps", "verify_first_iteration"))
    gpu = f"a GPU of {capacity / GIB:.0f} GiB" if capacity else "a GPU"
    plan = MemoryPlan(
        phases,
        capacity,
        "this machine" if device == "cpu" else gpu,
        offloaded_bytes=ranks * sum((model.state - estimate_idle(model)).total() for model in models),
        offloaded_activations=ranks * sum(model.offloaded_bytes for model in models),
        saved_activations=policy.saved_bytes,
        checkpoint_copy_bytes=ranks * copied if trainer.save_freq not in (-1, 0) or records else 0,
        shards=policy.shards,
        traffic_bytes=policy.traffic_bytes,
        frozen_parameters=sum(model.sizes.parameters for model in frozen),
    )
    return _add_engines(config, plan, device) if isinstance(config, Config) else plan


def _multiply(usage: Usage, count: int) -> Usage:
    return Usage({kind: size * count for kind, size in usage.items()})


def _make_rank_models(config: Config | TuningConfig, device: Device, request: MemoryRequest) -> dict[str, RankModel]:
    """Return the trained models on a rank by the phase of their update, the policy first."""
    shape, ranks = find_micro_batch_shape(config, request), config.trainer.num_ranks
    roles: dict[str, tuple[Model, Actor | Critic | TuningConfig, int, int]]  # ..., steps per update, copies of logits
    if not isinstance(config, Config):
        roles, image_tokens = {UPDATE: (config.model, config, 2, LOGIT_COPIES * request.computes_logits)}, shape[1]
    else:
        role, critic, image_tokens = config.actor_rollout_ref, config.critic, config.data.max_prompt_length
        copies = DIVERGENCE_COPIES if _computes_divergence(config) else LOGIT_COPIES
        roles = {f"{UPDATE} of the policy": (role.model, role.actor, config.steps_per_iteration, copies)}
        if has_critic(config):
            steps, model = config.num_mini_batches * critic.ppo_epochs, make_critic_model_section(role.model, critic)
            roles[f"{UPDATE} of the critic"] = model, critic, steps, 0
    return {
        phase: make_rank_model(
            model, section.fsdp_config, device, ranks, shape, section.optim.name, steps, copies, image_tokens
        )
        for phase, (model, section, steps, copies) in roles.items()
    }


def _make_frozen_models(config: Config, device: Device, shards: int) -> list[RankModel]:
    """Return reference, teachers and reward model on a rank. With LoRA, the base model is the reference. A self-teacher
    has the policy's float32 weights."""
    role, teacher, scorer = config.actor_rollout_ref, config.teacher, config.reward_model
    tokens = math.prod(find_micro_batch_shape(config, MemoryRequest(config.max_teacher_length)))
    adapts, frozen = bool(role.model.lora_rank), list[RankModel]()
    if config.needs_reference and not adapts:
        frozen.append(make_frozen_model(role.model, role.ref.fsdp_config, device, shards, tokens))
    if teacher.uses_self_teacher:
        dtype = "" if adapts else "float32"
        frozen.append(make_frozen_model(role.model, role.actor.fsdp_config, device, shards, tokens, dtype))
    for key, model in make_teacher_model_sections(role.model, teacher).items():
        frozen.append(make_frozen_model(model, teacher.local_models[key].fsdp_config, device, shards, tokens))
    if scorer.enable:
        model = role.model.model_copy(update={"path": scorer.model.path})
        frozen.append(make_frozen_model(model, scorer.model.fsdp_config, device, config.trainer.num_ranks, tokens))
    return frozen


def has_critic(config: Config) -> bool:
    return "values" in get_estimator(config.algorithm.adv_estimator).needs


def _computes_divergence(config: Config) -> bool:
    return config.actor_rollout_ref.actor.uses_full_kl or config.teacher.uses_full_vocabulary


def _changes_frozen_models(config: Config) -> bool:
    """Return whether training changes the reference or the self-teacher, so that checkpoints contain them."""
    reset, adapts = config.algorithm.reference_reset, bool(config.actor_rollout_ref.model.lora_rank)
    return bool(reset.every or reset.patience or (config.teacher.uses_self_teacher and not adapts))


def _add_phases(
    config: Config, updates: dict[str, Usage], idle: Usage, policy: RankModel, frozen: list[RankModel]
) -> dict[str, Usage]:
    """Add the phases without update, and to the policy's update its frozen models. idle: memory of a waiting rank."""
    increases = [estimate_pass(model) - estimate_idle(model) for model in frozen]
    if _computes_divergence(config):  # the policy's update, the first one, gathers the heads of the frozen models
        heads = sum(model.dtype_bytes * model.sizes.root_parameters for model in frozen)
        weights = sum(usage["frozen models"] for usage in increases)
        updates[next(iter(updates))] += Usage({"frozen models": weights, "gathered layers": heads})
    is_offloaded = policy.offloads("param_offload") and not policy.offloads("offload_policy")
    reloaded = idle + Usage(weights=policy.state["weights"] if is_offloaded else 0)
    largest = max(increases, key=Usage.total, default=None)  # frozen models compute one after the other
    passes = {} if largest is None else {"frozen models compute": reloaded + largest}
    width = get_dtype_bytes(config.actor_rollout_ref.rollout.dtype)
    sent = Usage({"transfer buckets": count_sent_bytes(policy.sizes, width)})
    return updates | passes | {"publish": reloaded + sent, "generate": idle}


def _add_engines(config: Config, plan: MemoryPlan, device: Device) -> MemoryPlan:
    """Add the engines to the phases of a rank (on a CPU: of a machine), and choose the size of their KV cache."""
    rollout, capacity, phases = config.actor_rollout_ref.rollout, plan.capacity, plan.phases
    engine, token_bytes = estimate_engine(config, device), count_kv_token_bytes(config)
    sequence_bytes, has_process, shortage = config.data.max_length * token_bytes, rollout.has_engine_process, ""
    if device == "cpu":
        share, cache, key = 0.0, int(rollout.kv_cache_gib * GIB), f"kv_cache_gib={rollout.kv_cache_gib:g}"
    else:
        share = _choose_engine_share(config, phases, engine.total() + MIN_ROWS * sequence_bytes, capacity)
        cache = int(share * capacity) - engine.total()
        key = f"gpu_memory_utilization={share:g} of {plan.device_name}"
    # too small only if a sequence does not fit even without the engine buffers, which are an estimate
    if has_process and (capacity or device == "cpu") and sequence_bytes > cache + engine["engine buffers"]:
        weights = f"{engine['engine weights'] / GIB:.1f} GiB for its weights and " if device == "cuda" else ""
        needs = f"{weights}{sequence_bytes / GIB:.2f} GiB for a sequence of {config.data.max_length} tokens"
        shortage = f"{ROLLOUT}.{key} is too small: an engine needs {needs}."
    engine["kv cache"] = max(0, cache) if has_process else 0
    is_reducible = device == "cuda" and rollout.gpu_memory_utilization == "auto"
    plan = replace(
        plan,
        engine_share=share,
        kv_cache_tokens=engine["kv cache"] // token_bytes,
        spare_kv_cache=max(0, engine["kv cache"] - sequence_bytes) if is_reducible else 0,
        problem=shortage,
    )
    if device == "cpu":
        count = rollout.num_engines or 1
        processes = (3 if has_process else 1) * has_worker_processes(config.trainer, count)
        engines = _multiply(engine + Usage(runtime=processes * PROCESS["cpu"]), count)
        return replace(plan, phases={name: usage + engines for name, usage in phases.items()})
    asleep = Usage({"engine buffers": SLEEPING_ENGINE if has_process else 0})
    if not rollout.colocate:
        training_phases = {name: usage for name, usage in phases.items() if name != "generate"}
        return replace(plan, phases=training_phases | {"generate (an engine's GPU)": engine + asleep})
    awake = dict.fromkeys(phases, engine)
    if rollout.free_cache_engine:
        sizes, width = load_model_sizes(config.actor_rollout_ref.model), get_dtype_bytes(rollout.dtype)
        experts = sizes.layer_expert_parameters
        # vLLM copies each bucket, collects the experts of a layer, and loads them beside the experts in use
        loading = width * (experts + 2 * experts // rollout.tensor_model_parallel_size)
        received = Usage({"engine buffers": count_bucket_bytes(sizes, width) + loading})
        awake = {"generate": engine, "publish": received + Usage({"engine weights": engine["engine weights"]})}
    return replace(plan, phases={name: usage + asleep + awake.get(name, Usage()) for name, usage in phases.items()})


def _choose_engine_share(config: Config, phases: dict[str, Usage], needed: int, capacity: int) -> float:
    """Return rollout.gpu_memory_utilization or, if it is `auto`, the share of a GPU of `capacity` bytes (0: unknown)
    that the `phases` of training leave to an engine, but at least the `needed` bytes."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.gpu_memory_utilization != "auto":
        return rollout.gpu_memory_utilization
    if not capacity:
        return DEFAULT_ENGINE_SHARE
    shared = [phases["generate"]] if rollout.free_cache_engine else phases.values()
    training = max(usage.total() for usage in shared) * rollout.colocate + SLEEPING_ENGINE * rollout.has_engine_process
    return math.floor(100 * max(USABLE - training / capacity, min(USABLE, needed / capacity))) / 100


def get_trained_section(config: Config | TuningConfig) -> Actor | TuningConfig:
    """Return the section with the settings of the trained model: fsdp_config, optim, sequence parallelism."""
    return config.actor_rollout_ref.actor if isinstance(config, Config) else config


def find_micro_batch_shape(config: Config | TuningConfig, request: MemoryRequest | None = None) -> tuple[int, int]:
    """Return (rows, tokens per row) of the largest micro-batch on a rank. It has at least one row, even if the row is
    longer than the token budget. request: None = data.max_length."""
    request = request or MemoryRequest(config.data.max_length)
    if isinstance(config, Config):
        actor = config.actor_rollout_ref.actor
        batch, budget = min(actor.ppo_mini_batch_size, config.trajectories_per_update), actor.ppo_max_token_len_per_gpu
    else:
        batch, budget = config.data.train_batch_size, config.data.max_token_len_per_gpu
    parallel = get_trained_section(config).ulysses_sequence_parallel_size
    num_groups = config.trainer.num_ranks // parallel  # groups of ranks that share sequences
    group_examples = -(-batch // num_groups)
    longest = request.longest_row * request.rows_per_example
    tokens = max(longest, min(get_resolved(budget) * parallel, group_examples * longest)) // parallel
    examples = max(1, -(-tokens // longest))
    return examples * request.rows_per_example, max(1, tokens // examples // request.rows_per_example)
