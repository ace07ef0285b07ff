"""Builders of the worker of each role from its sections of the configuration.

They run in the worker's process, so that the driver does not import torch models and vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from alphaapollo.config.schema import (
    ActorRolloutRef,
    Algorithm,
    Critic,
    CustomRewardFunction,
    Data,
    Env,
    FrozenFsdp,
    GenerationData,
    Model,
    Reward,
    Rollout,
    Teacher,
)
from alphaapollo.config.schema.base import Device

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.weight_sync.transport import Transport, TransportKind
    from alphaapollo.workers.critic import CriticWorker
    from alphaapollo.workers.policy import PolicyWorker
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.reward_model import RewardModelWorker


def build_policy(
    role: ActorRolloutRef,
    teacher: Teacher,
    algorithm: Algorithm,
    needs_reference: bool,
    transport: Transport,
    optimizer_steps: int,
    seed: int,
    saves_in_background: bool,
    client: Any,
    placement: RankPlacement,
) -> PolicyWorker:
    """Build a policy worker.

    Args:
        optimizer_steps: of the whole run.
        seed: of new adapters (LoRA).
        client: engine side of vLLM's own weight transfer, on GPUs.
    """
    from alphaapollo.utils.user_module import load_user_module
    from alphaapollo.weight_sync.transport import make_sender
    from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig

    if algorithm.custom_module:
        load_user_module(algorithm.custom_module, "algorithm.custom_module")
    master_address = str(urlsplit(placement.init_method).hostname)  # the node of rank 0
    sender = make_sender(transport, placement.rank, placement.engine_node, master_address, client)
    setup = PolicyWorkerConfig(
        model=role.model,
        actor=role.actor,
        ref=role.ref,
        needs_reference=needs_reference,
        optimizer_steps=optimizer_steps,
        temperature=role.rollout.temperature,
        correction=algorithm.rollout_correction,
        seed=seed,
        engine_form=role.rollout.lora,
        saves_in_background=saves_in_background,
        teacher=teacher,
        teacher_model=teacher_model(role.model, teacher) if teacher.divergence else None,
    )
    return PolicyWorker(setup, placement, sender)


def teacher_model(policy: Model, teacher: Teacher) -> Model:
    """The teacher's model section: with the policy's dtype and attention."""
    own = {"path": teacher.model.path, "trust_remote_code": teacher.model.trust_remote_code, "tokenizer_path": ""}
    return policy.model_copy(update=own | {"lora_rank": 0, "enable_gradient_checkpointing": False})


def build_critic(
    model: Model, critic: Critic, seed: int, optimizer_steps: int, saves_in_background: bool, placement: RankPlacement
) -> CriticWorker:
    """model: the policy's."""
    from alphaapollo.workers.critic import CriticWorker

    return CriticWorker(critic_model(model, critic), critic, placement, optimizer_steps, seed, saves_in_background)


def critic_model(policy: Model, critic: Critic) -> Model:
    """The critic's model section: loaded as the policy, by default the same model, with adapters of its own."""
    own = critic.model
    lora = {"lora_rank": own.lora_rank, "lora_alpha": own.lora_alpha, "target_modules": own.target_modules}
    return policy.model_copy(update={"path": own.path or policy.path} | lora)


def build_reward_model(model: Model, fsdp: FrozenFsdp, placement: RankPlacement) -> RewardModelWorker:
    from alphaapollo.workers.reward_model import RewardModelWorker

    return RewardModelWorker(model, fsdp, placement)


def build_engine(
    model: Model,
    rollout: Rollout,
    env: Env,
    data: Data | GenerationData,
    reward: Reward,
    custom_reward: CustomRewardFunction,
    device: Device,
    run_dir: str,
    shared_memory: str,
    transport: TransportKind,
    index: int,
    node: str = "",
) -> RolloutWorker:
    """node: where the worker runs; determines the folder of its weights, if any are published."""
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.weight_sync.transport import weights_folder

    return RolloutWorker(
        model=model,
        rollout=rollout,
        env=env,
        data=data,
        reward=reward,
        custom_reward=custom_reward,
        device=device,
        run_dir=run_dir,
        index=index,
        transport=transport,
        weights_folder=weights_folder(shared_memory, node),
        cleanup=[shared_memory],
    )
