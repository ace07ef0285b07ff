"""Memory of a run before it starts: what each GPU (on a CPU: the machine) holds at each moment, and which keys help
where that is too much.

    config.json on the meta device --models/activations.py--> sizes --models/footprint.py--> bytes by role
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from alphaapollo.algorithms.divergence import REVERSE, Divergence, divergence_of
from alphaapollo.config.keys import plain, with_value
from alphaapollo.config.schema import Config, Model, RoleFsdp, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.launch.builders import critic_model, teacher_model
from alphaapollo.launch.model_memory import (
    GIB,
    NAMES,
    RAY,
    RUNTIME,
    MemoryPlan,
    bytes_of,
    inference_of,
    largest_micro_batch,
    sizes_of,
    trained_model,
    with_copies,
)
from alphaapollo.models.activations import Activations
from alphaapollo.models.footprint import Engine, Held, Trained, frozen_slices, transfer_buckets
from alphaapollo.weight_sync.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class Roles:
    """What a run holds besides the policy."""

    reference: bool
    full_kl: bool  # the reference's distribution, inside the policy's update
    critic: bool
    reward_model: bool


def plan_memory(config: Config, device: Device, roles: Roles, capacity: int) -> MemoryPlan:
    """Of a checked configuration whose `model` and `rollout` sections are resolved.

    capacity: bytes of one GPU, or of the machine for training on a CPU; 0: not known.
    """
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    rank, engine = _rank(config, device, roles), _engine(config, device, capacity)
    sizes, at_rest, updates = rank.policy.sizes, rank.at_rest, rank.updates
    copies = rank.copies * trainer.n_gpus_per_node if trainer.save_freq > 0 or trainer.record_steps else 0
    publish = rank.publishing + Held(buckets=transfer_buckets(sizes, bytes_of(rollout.dtype), BUCKET_BYTES))
    kv_token = sizes.kv_elements * bytes_of(rollout.dtype) // min(rollout.tensor_model_parallel_size, sizes.kv_heads)
    kv_tokens = engine.awake().kv_cache // kv_token
    if device == "cpu":
        engines = engine.awake() * (rollout.num_engines or 1)
        moments = updates | {"publish": publish, "generate": at_rest}
        others = Held(runtime=_other_processes(config, roles))
        node = {name: held * trainer.n_gpus_per_node + engines + others for name, held in moments.items()}
        return MemoryPlan(node, capacity, "this machine", kv_tokens, copies=copies)
    if not rollout.colocate:
        moments = updates | {"publish": publish, "generate (an engine's GPU)": engine.awake()}
    elif rollout.free_cache_engine:
        moments = updates | {"publish": publish + engine.receiving(), "generate": at_rest + engine.awake()}
    else:
        awake = {**updates, "publish": publish, "generate": at_rest}
        moments = {name: held + engine.awake() for name, held in awake.items()}
    what = f"a GPU of {capacity / GIB:.0f} GiB" if capacity else "a GPU"
    return MemoryPlan(moments, capacity, what, kv_tokens, rank.on_host * trainer.n_gpus_per_node, copies)


def _other_processes(config: Config, roles: Roles) -> int:
    """Libraries and interpreters beside the policy's ranks, where all of a run is on one machine. Bytes"""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.controller == "local":
        return 0  # one process, the policy's own
    ranks = trainer.n_gpus_per_node * (roles.critic + roles.reward_model)
    an_engine = 3 if rollout.name == "vllm" else 1  # its worker; vLLM's core, and the server that forked it
    driver = 1
    return (ranks + an_engine * (rollout.num_engines or 1) + driver) * RUNTIME["cpu"] + RAY


@dataclass(frozen=True)
class Rank:
    """A training rank without engines."""

    policy: Trained
    at_rest: Held  # while engines generate
    publishing: Held  # the policy's phase goes on after its update
    on_host: int  # bytes in the machine's own memory, of what rests there
    copies: int  # the same, of what a checkpoint is written from
    updates: dict[str, Held]


def _rank(config: Config, device: Device, roles: Roles) -> Rank:
    role = config.actor_rollout_ref
    on_gpu, fsdp = device == "cuda", role.actor.fsdp_config
    against = divergence_of(config.teacher) if config.teacher.whole else REVERSE if roles.full_kl else None
    policy = _trained(config, device, role.model, fsdp, config.optimizer_steps, against)
    trained = {"policy": policy}
    if roles.critic:
        own, steps = config.critic, config.mini_batches * config.critic.ppo_epochs
        trained["critic"] = _trained(config, device, critic_model(role.model, own), own.fsdp_config, steps, head=False)
    runtime, reference, reward = Held(runtime=RUNTIME[device]), Held(), Held()
    width, shards = bytes_of(role.model.dtype), policy.shards
    if roles.reference and not policy.adapters and not (role.ref.fsdp_config.offload_policy and on_gpu):
        reference = Held(frozen=frozen_slices(policy.sizes, shards, width))
    scorer = config.reward_model.model
    if roles.reward_model and not ((scorer.fsdp_config.param_offload or scorer.fsdp_config.offload_policy) and on_gpu):
        sizes = sizes_of(role.model.model_copy(update={"path": scorer.path}))
        reward = Held(frozen=frozen_slices(sizes, config.trainer.num_ranks, width))
    resting = Held() if role.ref.fsdp_config.param_offload and on_gpu else reference
    in_update = reference if roles.full_kl else resting
    on_host = reference.total - resting.total
    updates: dict[str, Held] = {}
    if config.teacher.divergence:
        teacher = _teacher(config, device, shards)
        on_host += teacher.slices.total - teacher.at_rest.total
        resting, in_update = resting + teacher.at_rest, in_update + teacher.in_update
        beside = sum((one.resting() for name, one in trained.items() if name != "policy"), runtime + reward + in_update)
        updates["the teacher's pass"] = policy.stepped() + teacher.passing + beside
    for name, one in trained.items():
        always = runtime + reward + (in_update if name == "policy" else resting)
        others = sum((other.resting() for key, other in trained.items() if key != name), always)
        updates |= {f"update of the {name}, {moment}": held + others for moment, held in one.updating().items()}
    at_rest = sum((one.resting() for one in trained.values()), runtime + reward + resting)
    critics = sum((one.resting() for name, one in trained.items() if name != "policy"), runtime + reward + in_update)
    on_host += sum(one.on_host() for one in trained.values())
    copies = sum(one.saved() for one in trained.values())
    if config.algorithm.reference_reset.every or config.algorithm.reference_reset.patience:
        copies += frozen_slices(policy.sizes, shards, width)
    return Rank(policy, at_rest, policy.stepped() + critics, on_host, copies, updates)


@dataclass(frozen=True)
class Teaching:
    """A teacher on one rank."""

    slices: Held
    at_rest: Held  # between its phases
    in_update: Held  # where an update compares whole distributions: with its head, which stays gathered
    passing: Held  # its forward pass, beside `in_update`


def _teacher(config: Config, device: Device, shards: int) -> Teaching:
    own, model = config.teacher, teacher_model(config.actor_rollout_ref.model, config.teacher)
    sizes, width, fsdp, on_gpu = sizes_of(model), bytes_of(model.dtype), own.model.fsdp_config, device == "cuda"
    rows, length = micro_batch(config)
    slices = Held() if fsdp.offload_policy and on_gpu else Held(frozen=frozen_slices(sizes, shards, width))
    at_rest = Held() if fsdp.param_offload and on_gpu else slices
    layers = Held(gathered=2 * width * sizes.unit, activations=inference_of(model, rows * length))
    root = Held(gathered=width * sizes.root)
    if own.whole:
        return Teaching(slices, at_rest, slices + root, layers)
    return Teaching(slices, at_rest, at_rest, layers + root + (Held() if at_rest == slices else slices))


def _trained(
    config: Config,
    device: Device,
    model: Model,
    fsdp: RoleFsdp,
    steps: int,
    against: Divergence | None = None,
    head: bool = True,
) -> Trained:
    """steps: optimiser steps of an update."""
    trained = trained_model(model, fsdp, device, config.trainer.num_ranks, micro_batch(config), head, against)
    trained = replace(trained, activations=_with_shared_keys(trained, config, model))
    return replace(trained, rest_weights=fsdp.param_offload and device == "cuda", one_step=steps == 1)


def _with_shared_keys(trained: Trained, config: Config, model: Model) -> Activations:
    """With the keys and values of shared prompts, of which attention keeps a copy a sample: for prompts of the largest
    length, and responses of a quarter of theirs."""
    actor, samples, kept = config.actor_rollout_ref.actor, config.group_size, trained.activations
    if actor.use_prefix_grouper is False:
        return kept
    prompt, response = config.data.max_prompt_length, max(1, config.data.max_response_length // 4)
    copies = samples * (prompt + response) / (prompt + samples * response) - 1
    rows, length = micro_batch(config)
    of_layer = int(copies * rows * length * trained.sizes.kv_elements * trained.dtype_bytes / trained.sizes.num_layers)
    if model.enable_gradient_checkpointing:
        return replace(kept, layer=kept.layer + of_layer)
    return replace(kept, kept=kept.kept + of_layer * trained.sizes.num_layers)


def micro_batch(config: Config) -> tuple[int, int]:
    """Rows and their length of the largest micro-batch of a rank."""
    data, actor = config.data, config.actor_rollout_ref.actor
    return largest_micro_batch(
        longest=data.max_prompt_length + data.max_response_length,
        step_rows=min(actor.ppo_mini_batch_size, config.trajectories),
        max_tokens=actor.ppo_max_token_len_per_gpu,
        ranks=config.trainer.num_ranks,
        shared=actor.ulysses_sequence_parallel_size,
    )


def _engine(config: Config, device: Device, capacity: int) -> Engine:
    """An engine's share of a device."""
    role = config.actor_rollout_ref
    rollout, model = role.rollout, role.model
    sizes, width, parts = sizes_of(model), bytes_of(rollout.dtype), rollout.tensor_model_parallel_size
    if rollout.name == "fake":
        return Engine(0, 0, 0)
    weights = width * sizes.parameters // parts
    if device == "cpu":
        cache = int(rollout.kv_cache_gib * GIB) if rollout.name == "vllm" else 0
        return Engine(budget=weights + cache, weights=weights, working=0)
    tokens = max(rollout.max_num_batched_tokens, config.data.max_prompt_length + config.data.max_response_length)
    working = inference_of(model, tokens) // parts
    logits = 2 * 4 * rollout.max_num_seqs * (sizes.head // sizes.hidden_size)  # float32, and a copy to sample from
    return Engine(int(rollout.gpu_memory_utilization * capacity), weights, working + logits)


def fit_memory(
    config: Config, device: Device, roles: Roles, capacity: int, may_choose: bool, host: int = 0
) -> tuple[Config, MemoryPlan]:
    """The configuration with gradient checkpointing on where the plan may choose and finds it needed, and its memory,
    with a problem where it cannot fit.

    host: bytes of a GPU machine's own memory; 0: not known.
    """
    plan = plan_memory(config, device, roles, capacity)
    if may_choose and not plan.comfortable:
        config = with_keys(config, {CHECKPOINTING: True})
        plan = plan_memory(config, device, roles, capacity)
    if device == "cpu" and (problem := _small_cache(config, plan)):
        return config, replace(plan, problem=problem)
    if plan.fits and host and plan.host > host:
        problem = (
            f"memory: what is offloaded needs {plan.host / GIB:.0f} GiB of a node's own memory, which has "
            f"{host / GIB:.0f}. Leave some of the offload keys of fsdp_config out, or raise trainer.nnodes."
        )
        return config, replace(plan, problem=problem)
    if plan.fits:
        return config, with_copies(plan, device, host)
    moment, held = plan.peak
    largest = sorted(held.by_role().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{NAMES[role]} {size / GIB:.1f}" for role, size in largest)
    advice = _advice(config, device, roles, capacity)
    problem = f"memory: {held.total / GIB:.1f} GiB are needed on {plan.what} at its peak ({moment}: {parts}). {advice}"
    return config, replace(plan, problem=problem)


def _small_cache(config: Config, plan: MemoryPlan) -> str:
    """Why an engine's cache is too small for a single sequence; empty where it is not."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    if rollout.name != "vllm" or plan.kv_tokens >= longest:
        return ""
    return (
        f"{ROLLOUT}.kv_cache_gib={rollout.kv_cache_gib:g}: room for {plan.kv_tokens} tokens, and a sequence may have "
        f"{longest} (data.max_prompt_length + data.max_response_length). Raise it, or lower those."
    )


CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
USUAL_CACHE = Rollout().kv_cache_gib
ACTOR, ROLLOUT, BUDGET = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "ppo_max_token_len_per_gpu"


def _advice(config: Config, device: Device, roles: Roles, capacity: int) -> str:
    keys = cheapest_keys(config, device, roles, capacity, lambda plan: plan.fits)
    if keys is None:
        return f"No key makes it fit on so few {'GPUs' if device == 'cuda' else 'machines'}: raise trainer.nnodes."
    return f"Set {' '.join(f'{key}={plain(value)}' for key, value in keys.items())}."


def cheapest_keys(
    config: Config, device: Device, roles: Roles, capacity: int, is_good: Callable[[MemoryPlan], bool]
) -> dict[str, object] | None:
    """What to take of the ladder for a good plan: steps from its foot on, without those that are not needed."""

    def good(keys: Mapping[str, object]) -> bool:
        return is_good(plan_memory(with_keys(config, keys), device, roles, capacity))

    keys: dict[str, object] = {}
    steps = ladder(config, device, roles)
    while not good(keys):
        step = next(steps, None)
        if step is None:
            return None
        keys[step[0]] = step[1]
    for key in reversed(list(keys)):
        fewer = {other: value for other, value in keys.items() if other != key}
        keys = fewer if good(fewer) else keys
    return keys


def ladder(config: Config, device: Device, roles: Roles) -> Iterator[tuple[str, object]]:
    """Keys that save memory, the cheapest in time first."""
    role, data = config.actor_rollout_ref, config.data
    if not role.model.enable_gradient_checkpointing:
        yield CHECKPOINTING, True
    trained = [ACTOR, *["critic"] * roles.critic]
    if device == "cuda":
        yield from ((f"{section}.fsdp_config.optimizer_offload", True) for section in trained)
        if roles.reference:
            yield "actor_rollout_ref.ref.fsdp_config.param_offload", True
        if config.teacher.divergence:
            yield "teacher.model.fsdp_config.param_offload", True
    longest, budget = data.max_prompt_length + data.max_response_length, role.actor.ppo_max_token_len_per_gpu
    while budget > longest:
        budget = max(longest, budget // 2)
        yield f"{ACTOR}.{BUDGET}", budget
    if device == "cpu":
        if role.rollout.kv_cache_gib > USUAL_CACHE:
            yield f"{ROLLOUT}.kv_cache_gib", USUAL_CACHE
        return
    if role.rollout.gpu_memory_utilization > 0.3:
        yield f"{ROLLOUT}.gpu_memory_utilization", 0.3
    for key in ("param_offload", "offload_policy"):
        yield from ((f"{section}.fsdp_config.{key}", True) for section in trained)


def with_keys(config: Config, values: Mapping[str, object]) -> Config:
    """The configuration with other values of dotted keys."""
    for key, value in values.items():
        config = with_value(config, key, value)
    return config
