"""Build the policy worker, and the `model` configuration sections of the other models."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from urllib.parse import urlsplit

import torch

from alphaapollo.config.schema import Critic, Model, RewardModel, Teacher
from alphaapollo.engines.weight_sync.shared_memory import SharedAdapterSender, SharedMemorySender
from alphaapollo.engines.weight_sync.transport import CallEngines, Transport, WeightSender, get_weights_folder
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
from alphaapollo.workers.process_group import RankPlacement


def build_policy_worker(
    config: PolicyWorkerConfig,
    transport: Transport,
    custom_module: str,
    placement: RankPlacement,
    call_engines: CallEngines | None = None,
) -> PolicyWorker:
    """Build the policy worker of one rank, in the worker's process.

    custom_module: value of algorithm.custom_module, the user's file with losses and estimators. call_engines: calls a
    method of the weight transfer on all engines (GPUs only).
    """
    if custom_module:
        load_user_module(custom_module, "algorithm.custom_module")
    return PolicyWorker(config, placement, make_weight_sender(transport, placement, call_engines))


def make_weight_sender(
    transport: Transport, placement: RankPlacement, call_engines: CallEngines | None = None
) -> WeightSender:
    """Build the weight sender of a training rank."""
    dtype: torch.dtype = getattr(torch, transport.dtype)
    if transport.kind == "adapter" or transport.kind == "shared_memory":
        sender = SharedAdapterSender if transport.kind == "adapter" else SharedMemorySender
        folder = get_weights_folder(transport.shared_folder, placement.engine_node or "")
        return sender(folder, dtype, is_writer=placement.engine_node is not None)
    master_address = str(urlsplit(placement.init_method).hostname)  # address of rank 0's node
    arguments = (call_engines, dtype, placement.rank, transport.kind, master_address, transport.num_engine_ranks)
    sender_class: Callable[..., WeightSender] = pkgutil.resolve_name(transport.sender)
    return sender_class(*arguments)


def make_teacher_model_sections(policy: Model, teacher: Teacher) -> dict[str, Model]:
    """Return the `model` section of each teacher on the policy's ranks, by its configuration key: the policy's section
    with the teacher's path, without LoRA."""
    changes = {"tokenizer_path": "", "lora_rank": 0}
    return {
        key: policy.model_copy(update={"path": local.path, "trust_remote_code": local.trust_remote_code, **changes})
        for key, local in teacher.local_models.items()
    }


def make_critic_model_section(policy: Model, critic: Critic) -> Model:
    """Return the critic's `model` section: the policy's section with the critic's LoRA keys and, if set, its path."""
    return policy.model_copy(update=dict(critic.model) | {"path": critic.model.path or policy.path})


def make_reward_model_section(policy: Model, config: RewardModel) -> Model:
    """Return the reward model's `model` section: its own path, the policy's dtype and attention."""
    model = config.model
    return policy.model_copy(update={"path": model.path, "trust_remote_code": model.trust_remote_code})
