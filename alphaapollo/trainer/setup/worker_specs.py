"""Worker specs of a run, from its configuration and plan."""

from __future__ import annotations

from functools import partial

from alphaapollo.config.schema import Config, CustomRewardFunction
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.launch.builders import build_critic, build_engine, build_policy, build_reward_model
from alphaapollo.rewards import zero_reward
from alphaapollo.trainer.setup.plan import Plan
from alphaapollo.trainer.step.reward_model_scorer import reward_model_settings
from alphaapollo.weight_sync.transport import Transport, transport_kind


def make_worker_specs(config: Config, plan: Plan, run_id: str, iterations: int, has_function: bool) -> WorkerSpecs:
    """Specify the workers of a run.

    Args:
        iterations: of the whole run, for learning rate schedules.
        has_function: whether something besides the reward model gives a reward.
    """
    placement, seed = plan.placement, config.trainer.seed
    role = config.actor_rollout_ref.model_copy(update={"model": plan.model, "rollout": plan.rollout})
    transport = _make_transport(config, plan, f"/dev/shm/alphaapollo-{run_id}")
    policy_steps, critic_steps = config.policy_steps(iterations), config.critic_steps(iterations)
    own, scorer = config.reward_model.model, reward_model_settings(config.reward_model, plan.model)
    custom_reward = config.custom_reward_function
    if not has_function:
        custom_reward = CustomRewardFunction(path=zero_reward.__file__, name=zero_reward.zero_reward.__name__)
    behind = plan.saves_in_background
    critic = partial(build_critic, role.model, config.critic, seed, critic_steps, behind)
    return WorkerSpecs(
        placement=placement,
        run_id=run_id,
        policy=partial(
            build_policy,
            role,
            config.teacher,
            config.algorithm,
            plan.needs_reference,
            transport,
            policy_steps,
            seed,
            behind,
        ),
        critic=critic if placement.critic else None,
        reward_model=partial(build_reward_model, scorer, own.fsdp_config) if placement.reward_model else None,
        engine=partial(
            build_engine,
            role.model,
            role.rollout,
            config.env,
            config.data,
            config.reward,
            custom_reward,
            placement.device,
            str(config.trainer.folder.resolve()),
            transport.shared_memory,
            transport.kind,
        ),
        through_memory=transport.kind in ("shared_memory", "adapter"),
        samples_in_flight=2 * role.rollout.max_num_seqs,
        cleanup=[transport.shared_memory],
    )


def _make_transport(config: Config, plan: Plan, shared_memory: str) -> Transport:
    placement, rollout = plan.placement, plan.rollout
    on_ray = rollout.name == "vllm" and config.trainer.controller == "ray"
    adapter = rollout.lora == "adapter"
    return Transport(
        kind=transport_kind(placement.device, placement.colocate, vllm_on_ray=on_ray, adapter=adapter),
        dtype=rollout.dtype,
        shared_memory=shared_memory,
        num_engine_ranks=placement.num_engines * placement.tensor_parallel,
    )
