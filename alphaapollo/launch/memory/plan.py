"""Memory plan of a run: bytes on a GPU, or on the machine without GPUs, at each moment, and keys that reduce them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.divergence import REVERSE, Divergence, make_divergence
from alphaapollo.config.keys import format_value, replace_value
from alphaapollo.config.schema import Config, Model, RoleFsdp, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.builders import make_critic_model, make_teacher_model
from alphaapollo.launch.memory.model import (
    FrozenModel,
    MemoryUsage,
    TrainedModel,
    count_frozen_bytes,
    get_dtype_bytes,
    largest_micro_batch,
    load_sizes,
    measure_inference,
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


def format_unmeasured_notice(path: str, error: BaseException, may_choose: bool) -> str:
    """Return a notice that the memory of a model cannot be planned because of one of the UNMEASURED errors."""
    reason = str(error).strip().split("\n")[0].rstrip(".!")
    chosen = " Gradient checkpointing stays off." * may_choose
    failure = f"{type(error).__name__}: {reason}"
    return f"the memory of {path} is not planned, because it cannot run on the meta device ({failure}).{chosen}"


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device at each moment of an iteration."""

    moments: dict[str, MemoryUsage]
    capacity: int  # bytes; 0: unknown
    device_name: str  # description of the device in messages
    kv_tokens: int  # capacity of an engine's KV cache in tokens
    host: int = 0  # bytes that GPUs offload to a node's host memory
    copies: int = 0  # bytes of the copies, in a node's host memory, from which checkpoints are written
    saves_in_background: bool = True  # whether the copies fit into memory
    problem: str = ""  # why the run cannot fit, and the keys that reduce memory; "": it fits

    @property
    def peak(self) -> tuple[str, MemoryUsage]:
        return max(self.moments.items(), key=lambda item: item[1].total)

    @property
    def fits(self) -> bool:
        return not self.capacity or self.peak[1].total <= self.capacity

    @property
    def has_headroom(self) -> bool:
        return not self.capacity or self.peak[1].total <= COMFORTABLE * self.capacity

    def reject(self, advice: str) -> MemoryPlan:
        """Return the plan with `problem` set, because its peak does not fit. advice: suggested fix."""
        moment, usage = self.peak
        largest = sorted(usage.by_kind().items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{kind.replace('_', ' ')} {size / GIB:.1f}" for kind, size in largest)
        needed = (
            f"memory: {usage.total / GIB:.1f} GiB are needed on {self.device_name} at its peak ({moment}: {parts})."
        )
        return replace(self, problem=f"{needed} {advice}")

    def add_copies(self, device: Device, host: int) -> MemoryPlan:
        """Return the plan with the copies for checkpoints, if they fit. host: bytes of host memory of a GPU node; 0:
        unknown."""
        if device == "cuda":
            return replace(self, saves_in_background=not host or self.host + self.copies <= COMFORTABLE * host)
        copies = MemoryUsage(checkpoint_copy=self.copies)
        plan = replace(self, moments={name: usage + copies for name, usage in self.moments.items()})
        return plan if plan.has_headroom else replace(self, saves_in_background=False)


def plan_memory(config: Config, device: Device, capacity: int) -> MemoryPlan:
    """Plan the memory of a checked configuration with resolved `model` and `rollout` sections.

    capacity: bytes of one GPU, or of the machine for training on a CPU; 0: unknown.
    """
    role, trainer = config.actor_rollout_ref, config.trainer
    rollout, sizes, engine = role.rollout, load_sizes(role.model), _plan_engine(config, device, capacity)
    moments, host, copies = _training_rank(config, device)
    copies *= trainer.n_gpus_per_node if trainer.save_freq > 0 or trainer.record_steps else 0
    kv_token = (
        sizes.kv_elements * get_dtype_bytes(rollout.dtype) // min(rollout.tensor_model_parallel_size, sizes.kv_heads)
    )
    kv_tokens = engine.kv_cache // kv_token
    if device == "cpu":
        shared = engine * (rollout.num_engines or 1) + MemoryUsage(runtime=_other_processes(config))
        node = {name: usage * trainer.n_gpus_per_node + shared for name, usage in moments.items()}
        return MemoryPlan(node, capacity, "this machine", kv_tokens, copies=copies)
    if not rollout.colocate:
        del moments["generate"]
        moments["generate (an engine's GPU)"] = engine
    elif rollout.free_cache_engine:
        moments["publish"] += MemoryUsage(engine=_engine_weights(config))
        moments["generate"] += engine
    else:
        moments = {name: usage + engine for name, usage in moments.items()}
    what = f"a GPU of {capacity / GIB:.0f} GiB" if capacity else "a GPU"
    return MemoryPlan(moments, capacity, what, kv_tokens, host * trainer.n_gpus_per_node, copies)


def _has_critic(config: Config) -> bool:
    return "values" in get_estimator(config.algorithm.adv_estimator).needs


def _other_processes(config: Config) -> int:
    """Return the bytes of the libraries of all processes except the policy's ranks, for a run on one machine."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.controller == "local":
        return 0  # everything is in the policy's process
    ranks = trainer.n_gpus_per_node * (_has_critic(config) + config.reward_model.enable)
    per_engine = 3 if rollout.name == "vllm" else 1  # worker; with vLLM also its engine core and fork server
    driver = 1
    return (ranks + per_engine * (rollout.num_engines or 1) + driver) * RUNTIME["cpu"] + RAY


def _training_rank(config: Config, device: Device) -> tuple[dict[str, MemoryUsage], int, int]:
    """Return the memory of a training rank without engines at each moment, its bytes offloaded to host memory, and the
    bytes of its copies for checkpoints."""
    role, full_kl = config.actor_rollout_ref, config.actor_rollout_ref.actor.full_kl
    divergence = make_divergence(config.teacher) if config.teacher.full_vocabulary else REVERSE if full_kl else None
    policy = _plan_trained_model(config, device, role.model, role.actor.fsdp_config, config.optimizer_steps, divergence)
    trained = {"policy": policy}
    if _has_critic(config):
        own, steps = config.critic, config.mini_batches * config.critic.ppo_epochs
        trained["critic"] = _plan_trained_model(
            config, device, make_critic_model(role.model, own), own.fsdp_config, steps, head=False
        )
    fixed, reference, teacher = MemoryUsage(runtime=RUNTIME[device]), FrozenModel(), FrozenModel()
    if config.reward_model.enable:
        scorer = config.reward_model.model
        model = role.model.model_copy(update={"path": scorer.path})
        fixed += plan_frozen_model(model, scorer.fsdp_config, config.trainer.num_ranks, device).idle
    if config.needs_reference and not policy.adapters:
        reference = plan_frozen_model(role.model, role.ref.fsdp_config, policy.shards, device)
    idle, in_update = reference.idle, reference.loaded if full_kl else reference.idle

    def sum_idle(active: str, frozen: MemoryUsage) -> MemoryUsage:
        return sum((model.idle() for name, model in trained.items() if name != active), fixed + frozen)

    moments: dict[str, MemoryUsage] = {}
    if config.teacher.divergence:
        model = make_teacher_model(role.model, config.teacher)
        teacher = plan_frozen_model(model, config.teacher.model.fsdp_config, policy.shards, device)
        head, forward = _teacher_pass(config, model)
        idle += teacher.idle
        if config.teacher.full_vocabulary:  # its head stays gathered in the policy's update
            in_update += teacher.loaded + head
        else:
            in_update += teacher.idle
            forward += head if teacher.idle == teacher.loaded else head + teacher.loaded
        moments["the teacher's pass"] = policy.usage_after_step() + forward + sum_idle("policy", in_update)
    for name, one in trained.items():
        beside = sum_idle(name, in_update if name == "policy" else idle)
        moments |= {f"update of the {name}, {moment}": usage + beside for moment, usage in one.plan_update().items()}
    buckets = MemoryUsage(transfer_buckets=_transfer_buckets(policy, get_dtype_bytes(role.rollout.dtype)))
    moments["publish"] = policy.usage_after_step() + sum_idle("policy", in_update) + buckets
    moments["generate"] = sum_idle("", idle)
    host = sum(one.host_bytes() for one in trained.values())
    host += sum(one.loaded.total - one.idle.total for one in (reference, teacher))
    copies = sum(one.checkpoint_bytes() for one in trained.values())
    if config.algorithm.reference_reset.every or config.algorithm.reference_reset.patience:
        copies += count_frozen_bytes(policy.sizes, policy.shards, get_dtype_bytes(role.model.dtype))
    return moments, host, copies


def _teacher_pass(config: Config, model: Model) -> tuple[MemoryUsage, MemoryUsage]:
    """Return the memory of the teacher's gathered head, and of the rest of its forward pass."""
    sizes, width, (rows, length) = load_sizes(model), get_dtype_bytes(model.dtype), micro_batch(config)
    layers = MemoryUsage(gathered_layers=2 * width * sizes.unit, activations=measure_inference(model, rows * length))
    return MemoryUsage(gathered_layers=width * sizes.root), layers


def _plan_trained_model(
    config: Config,
    device: Device,
    model: Model,
    fsdp: RoleFsdp,
    steps: int,
    divergence: Divergence | None = None,
    head: bool = True,
) -> TrainedModel:
    """Return the memory of a model in training, including the keys and values of shared prompts, which attention copies
    for each sample. Assumes prompts of maximum and responses of a quarter of maximum length. steps: optimizer steps
    per update."""
    rows, length = micro_batch(config)
    trained = plan_trained_model(model, fsdp, device, config.trainer.num_ranks, (rows, length), head, divergence)
    trained = replace(trained, offload_weights=fsdp.param_offload and device == "cuda", has_one_step=steps == 1)
    if config.actor_rollout_ref.actor.use_prefix_grouper is False:
        return trained
    samples, layers = config.group_size, trained.sizes.num_layers
    prompt, response = config.data.max_prompt_length, max(1, config.data.max_response_length // 4)
    copies = samples * (prompt + response) / (prompt + samples * response) - 1
    of_layer = int(copies * rows * length * trained.sizes.kv_elements * trained.dtype_bytes / layers)
    own = trained.activations
    if model.enable_gradient_checkpointing:
        return replace(trained, activations=replace(own, layer=own.layer + of_layer))
    return replace(trained, activations=replace(own, saved=own.saved + of_layer * layers))


def micro_batch(config: Config) -> tuple[int, int]:
    """Return number and length, in tokens, of the rows of a rank's largest micro-batch."""
    data, actor = config.data, config.actor_rollout_ref.actor
    return largest_micro_batch(
        longest=data.max_prompt_length + data.max_response_length,
        step_rows=min(actor.ppo_mini_batch_size, config.trajectories),
        max_tokens=actor.ppo_max_token_len_per_gpu,
        ranks=config.trainer.num_ranks,
        shared=actor.ulysses_sequence_parallel_size,
    )


def _engine_weights(config: Config) -> int:
    role = config.actor_rollout_ref
    size = get_dtype_bytes(role.rollout.dtype) * load_sizes(role.model).parameters
    return 0 if role.rollout.name == "fake" else size // role.rollout.tensor_model_parallel_size


def _plan_engine(config: Config, device: Device, capacity: int) -> MemoryUsage:
    """Return the memory of a generating engine on one device. On a GPU the KV cache fills the engine's share."""
    rollout, model, weights = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, _engine_weights(config)
    if rollout.name == "fake":
        return MemoryUsage()
    if device == "cpu":
        return MemoryUsage(engine=weights, kv_cache=int(rollout.kv_cache_gib * GIB) if rollout.name == "vllm" else 0)
    sizes, longest = load_sizes(model), config.data.max_prompt_length + config.data.max_response_length
    tokens = max(rollout.max_num_batched_tokens, longest)
    logits = 2 * 4 * rollout.max_num_seqs * (sizes.head // sizes.hidden_size)  # float32, and a copy to sample from
    used = weights + measure_inference(model, tokens) // rollout.tensor_model_parallel_size + logits
    return MemoryUsage(engine=used, kv_cache=max(0, int(rollout.gpu_memory_utilization * capacity) - used))


def _transfer_buckets(policy: TrainedModel, width: int) -> int:
    """Return the bytes of a weight sync: a bucket of about BUCKET_BYTES, its packed copy, the next bucket, and one
    gathered layer."""
    sizes = policy.sizes
    full = min(width * sizes.parameters, BUCKET_BYTES + width * sizes.head)
    return width * max(sizes.unit, sizes.root) + 3 * full


def fit_memory(
    config: Config, device: Device, capacity: int, may_choose: bool, host: int = 0
) -> tuple[Config, MemoryPlan]:
    """Plan the memory, and enable gradient checkpointing if `may_choose` and it is needed. Returns the configuration
    and the plan, whose `problem` is set if the run cannot fit.

    host: bytes of host memory of a GPU node; 0: unknown.
    """
    plan = plan_memory(config, device, capacity)
    if may_choose and not plan.has_headroom:
        config = with_keys(config, {CHECKPOINTING: True})
        plan = plan_memory(config, device, capacity)
    if device == "cpu" and (problem := _explain_small_cache(config, plan)):
        return config, replace(plan, problem=problem)
    if not plan.fits:
        return config, plan.reject(_format_advice(config, device, capacity))
    if host and plan.host > host:
        problem = (
            f"memory: offloading needs {plan.host / GIB:.0f} GiB of host memory per node, which has {host / GIB:.0f}. "
            "Leave out some of the offload keys of fsdp_config, or raise trainer.nnodes."
        )
        return config, replace(plan, problem=problem)
    return config, plan.add_copies(device, host)


def _explain_small_cache(config: Config, plan: MemoryPlan) -> str:
    """Return why an engine's KV cache is too small for one sequence, or "" if it is large enough."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    if rollout.name != "vllm" or plan.kv_tokens >= longest:
        return ""
    return (
        f"{ROLLOUT}.kv_cache_gib={rollout.kv_cache_gib:g} has room for {plan.kv_tokens} tokens, but a sequence may "
        f"have {longest} (data.max_prompt_length + data.max_response_length). Raise kv_cache_gib, or lower "
        "these lengths."
    )


def _format_advice(config: Config, device: Device, capacity: int) -> str:
    keys = cheapest_keys(config, device, capacity, lambda plan: plan.fits)
    if keys is None:
        unit = "GPUs" if device == "cuda" else "machines"
        return f"No key makes the run fit on this number of {unit}. Raise trainer.nnodes."
    return f"Set {' '.join(f'{key}={format_value(value)}' for key, value in keys.items())}."


def cheapest_keys(
    config: Config, device: Device, capacity: int, is_good: Callable[[MemoryPlan], bool]
) -> dict[str, object] | None:
    """Return the cheapest memory-saving keys whose plan satisfies `is_good`, or None if no keys do."""

    def gives_good_plan(keys: Mapping[str, object]) -> bool:
        return is_good(plan_memory(with_keys(config, keys), device, capacity))

    keys: dict[str, object] = {}
    options = memory_saving_keys(config, device)
    while not gives_good_plan(keys):
        option = next(options, None)
        if option is None:
            return None
        keys[option[0]] = option[1]
    for key in reversed(list(keys)):
        fewer = {other: value for other, value in keys.items() if other != key}
        keys = fewer if gives_good_plan(fewer) else keys
    return keys


def memory_saving_keys(config: Config, device: Device) -> Iterator[tuple[str, object]]:
    """Yield (key, value) pairs that save memory, those that cost the least time first."""
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
    longest, budget = data.max_prompt_length + data.max_response_length, role.actor.ppo_max_token_len_per_gpu
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


def with_keys(config: Config, values: Mapping[str, object]) -> Config:
    """Return the configuration with these values of dotted keys."""
    for key, value in values.items():
        config = replace_value(config, key, value)
    return config
