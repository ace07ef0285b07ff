"""How the worker of each role is built from the configuration.

The functions run in the worker's own process, so they import torch models and vLLM there and not in the driver.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from alphaapollo.config.notices import Device
from alphaapollo.config.schema import Config, CustomRewardFunction
from alphaapollo.controller.launch import Roles
from alphaapollo.controller.placement import Layout
from alphaapollo.trainer.plan import Plan
from alphaapollo.trainer.reward_model import scorer_model

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.base import RankPlacement
    from alphaapollo.workers.critic import CriticWorker
    from alphaapollo.workers.policy import PolicyWorker, WeightSender
    from alphaapollo.workers.reward_model import RewardModelWorker


def make_roles(config: Config, plan: Plan, run_id: str, optimiser_steps: int, has_function: bool) -> Roles:
    """What the crew starts.

    Args:
        optimiser_steps: of the whole run, for the schedules of the learning rates.
        has_function: something besides the reward model gives a reward.
    """
    shared_memory = f"/dev/shm/alphaapollo-{run_id}"
    return Roles(
        policy=partial(build_policy, config, plan.layout, plan.needs_reference, shared_memory, optimiser_steps),
        critic=partial(build_critic, config, optimiser_steps) if plan.layout.critic else None,
        reward_model=partial(build_reward_model, config) if plan.layout.reward_model else None,
        engine=partial(
            build_engine if has_function else build_silent_engine,
            config,
            plan.layout.device,
            str(plan.folder.resolve()),
            shared_memory,
        ),
        samples_in_flight=2 * config.actor_rollout_ref.rollout.max_num_seqs,
        cleanup=[shared_memory],
    )


def build_policy(
    config: Config,
    layout: Layout,
    needs_reference: bool,
    shared_memory: str,
    optimiser_steps: int,
    placement: RankPlacement,
    client: Any,
) -> PolicyWorker:
    from alphaapollo.user_module import load_user_module
    from alphaapollo.workers.policy import PolicyWorker

    if config.algorithm.custom_module:
        load_user_module(config.algorithm.custom_module, "algorithm.custom_module")
    role = config.actor_rollout_ref
    return PolicyWorker(
        model=role.model,
        actor=role.actor,
        ref=role.ref,
        needs_ref=needs_reference,
        placement=placement,
        total_steps=optimiser_steps,
        temperature=role.rollout.temperature,
        seed=config.trainer.seed,
        correction=config.algorithm.rollout_correction,
        sender=build_sender(config, layout, shared_memory, placement, client),
    )


def build_sender(
    config: Config, layout: Layout, shared_memory: str, placement: RankPlacement, client: Any
) -> WeightSender:
    """Shared memory on a CPU; vLLM's own transfer, driven through `client`, on GPUs."""
    import torch

    from alphaapollo.rollout.engines import engine_dtype

    role = config.actor_rollout_ref
    dtype = getattr(torch, engine_dtype(role.rollout, role.model, layout.device))
    if layout.device == "cpu":
        from alphaapollo.workers.weight_sync.shared_memory import SharedMemorySender

        return SharedMemorySender(f"{shared_memory}/weights", dtype, is_writer=placement.rank == 0)
    from alphaapollo.workers.weight_sync.vllm_transfer import VllmTransferSender

    return VllmTransferSender(
        client,
        dtype,
        placement.rank,
        transport="ipc" if layout.colocate else "nccl",
        master_address=str(urlsplit(placement.init_method).hostname),  # where the training ranks meet: rank 0's node
        num_engine_ranks=layout.num_engines * layout.tensor_parallel,
    )


def build_critic(config: Config, optimiser_steps: int, placement: RankPlacement) -> CriticWorker:
    from alphaapollo.workers.critic import CriticWorker

    model = config.actor_rollout_ref.model
    trunk = model.model_copy(update={"path": config.critic.model.path or model.path})
    return CriticWorker(trunk, config.critic, placement, optimiser_steps, config.trainer.seed)


def build_reward_model(config: Config, placement: RankPlacement) -> RewardModelWorker:
    from alphaapollo.workers.reward_model import RewardModelWorker

    own = config.reward_model.model
    return RewardModelWorker(scorer_model(config), own.fsdp_config.param_offload, placement)


def build_silent_engine(config: Config, *arguments: Any) -> RolloutWorker:
    """As build_engine, where the reward model alone gives a reward."""
    from alphaapollo.rewards import silent

    function = CustomRewardFunction(path=silent.__file__, name=silent.nothing.__name__)
    return build_engine(config.model_copy(update={"custom_reward_function": function}), *arguments)


def build_engine(config: Config, device: Device, run_dir: str, shared_memory: str, index: int) -> RolloutWorker:
    from alphaapollo.rollout.worker import RolloutWorker

    role = config.actor_rollout_ref
    return RolloutWorker(
        model=role.model,
        rollout=role.rollout,
        env=config.env,
        data=config.data,
        reward=config.reward,
        custom_reward=config.custom_reward_function,
        device=device,
        run_dir=run_dir,
        index=index,
        cleanup=[shared_memory],
    )
