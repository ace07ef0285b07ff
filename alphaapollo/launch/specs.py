"""Which workers a command starts, and how each is built in its process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.resolve import get_resolved, has_worker_processes
from alphaapollo.config.schema import ActorRolloutRef, Config, CustomRewardFunction, GenerationConfig, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.engines.factory import load_engine_class
from alphaapollo.engines.weight_sync.transport import Transport, choose_transport
from alphaapollo.launch.plan import Plan
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.rewards import zero_reward
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.workers.builders import (
    build_policy_worker,
    make_critic_model_section,
    make_reward_model_section,
    make_teacher_model_sections,
)
from alphaapollo.workers.critic import CriticWorker, RewardModelWorker
from alphaapollo.workers.policy import PolicyWorkerConfig


def make_inference_specs(config: GenerationConfig, rollout: Rollout, device: Device, folder: Path) -> WorkerSpecs:
    """Describe rollout workers without training ranks. rollout: with resolved settings. folder: for logs."""
    run_id = new_run_id()
    shared_memory = f"/dev/shm/alphaapollo-{run_id}"
    engines = RolloutWorkerConfig(
        model=config.model,
        rollout=rollout,
        env=config.env,
        data=config.data,
        reward=config.reward,
        custom_reward=config.custom_reward_function,
        device=device,
        run_dir=str(folder.resolve()),
        shared_memory=shared_memory,
    )
    assert rollout.num_engines is not None
    parallel = rollout.tensor_model_parallel_size
    return WorkerSpecs(
        placement=Placement(device=device, num_engines=rollout.num_engines, tensor_parallel=parallel),
        run_id=run_id,
        engine_builder=partial(RolloutWorker, engines),
        samples_in_flight=2 * get_resolved(rollout.max_num_seqs),
        cleanup_folders=[shared_memory],
    )


def make_worker_specs(
    config: Config,
    plan: Plan,
    run_id: str,
    total_iterations: int,
    has_reward_function: bool,
    policy_steps: int | None = None,
    serves_clients: bool = False,
) -> WorkerSpecs:
    """Describe how to build the training ranks and the rollout workers of a run.

    total_iterations: for learning rate schedules. has_reward_function: also True if the environment gives the reward.
    policy_steps: optimizer steps of the policy; None: those of the iterations. serves_clients: see RolloutWorkerConfig.
    """
    placement = plan.placement
    chosen = {"model": plan.model, "rollout": plan.rollout, "actor": plan.actor}
    role = config.actor_rollout_ref.model_copy(update=chosen)
    has_processes = has_worker_processes(config.trainer, placement.num_engines)
    sender = load_engine_class(role.rollout.name).weight_sender
    serves_adapters = role.rollout.lora == "adapter"
    transport = Transport(
        kind=choose_transport(placement.device, placement.colocate, bool(sender) and has_processes, serves_adapters),
        dtype=role.rollout.dtype,
        shared_folder=f"/dev/shm/alphaapollo-{run_id}",
        num_engine_ranks=placement.num_engines * placement.tensor_parallel,
        sender=sender,
    )
    custom_reward = config.custom_reward_function
    if not has_reward_function:
        custom_reward = CustomRewardFunction(path=zero_reward.__file__, name=zero_reward.zero_reward.__name__)
    groups = config.algorithm.filter_groups
    engines = RolloutWorkerConfig(
        model=role.model,
        rollout=role.rollout,
        env=config.env,
        data=config.data,
        reward=config.reward,
        custom_reward=custom_reward,
        device=placement.device,
        self_teacher=config.teacher.self_teacher if config.teacher.uses_self_teacher else None,
        run_dir=str(config.trainer.folder.resolve()),
        transport=transport.kind,
        shared_memory=transport.shared_folder,
        serves_suites=bool(config.trainer.val_suites),
        serves_clients=serves_clients,
        max_steps=total_iterations,
        needs_components="components" in get_estimator(config.algorithm.adv_estimator).needs
        or (groups.enable and groups.metric not in ("accuracy", "reward")),
    )
    return WorkerSpecs(
        placement=placement,
        run_id=run_id,
        rank_builders=_make_rank_builders(config, plan, role, transport, total_iterations, policy_steps),
        engine_builder=partial(RolloutWorker, engines),
        samples_in_flight=2 * get_resolved(role.rollout.max_num_seqs),
        cleanup_folders=[transport.shared_folder],
    )


def _make_rank_builders(
    config: Config,
    plan: Plan,
    section: ActorRolloutRef,
    transport: Transport,
    total_iterations: int,
    policy_steps: int | None,
) -> dict[str, Callable[..., object]]:
    """Return the functions that build the workers of one training rank: policy, and critic and reward model if used."""
    policy = PolicyWorkerConfig(
        model=section.model,
        actor=section.actor,
        ref=section.ref,
        needs_reference=config.needs_reference,
        optimizer_steps=policy_steps or config.count_policy_optimizer_steps(total_iterations),
        temperature=section.rollout.temperature,
        correction=config.algorithm.rollout_correction,
        seed=config.trainer.seed,
        engine_lora_form=section.rollout.lora,
        saves_in_background=plan.saves_in_background,
        teacher=config.teacher,
        teacher_models=make_teacher_model_sections(section.model, config.teacher),
    )
    build = partial(build_policy_worker, policy, transport, config.algorithm.custom_module)
    builders: dict[str, Callable[..., object]] = {"policy": build}
    if plan.placement.has_critic:
        builders["critic"] = partial(
            CriticWorker,
            make_critic_model_section(section.model, plan.critic),
            plan.critic,
            optimizer_steps=config.count_critic_optimizer_steps(total_iterations),
            seed=config.trainer.seed,
            saves_in_background=plan.saves_in_background,
        )
    if plan.placement.has_reward_model:
        scorer = make_reward_model_section(plan.model, config.reward_model)
        builders["reward model"] = partial(RewardModelWorker, scorer, config.reward_model.model.fsdp_config)
    return builders
