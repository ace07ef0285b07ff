"""Build the policy worker, and the `model` configuration sections of teachers and the critic."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from alphaapollo.config.schema import Critic, Model, Teacher
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.weight_sync.transport import Transport, make_weight_sender
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
from alphaapollo.workers.process_group import RankPlacement


def build_policy_worker(
    config: PolicyWorkerConfig, transport: Transport, custom_module: str, placement: RankPlacement, client: Any = None
) -> PolicyWorker:
    """Build the policy worker of one rank. Called in the worker's process.

    Args:
        custom_module: value of algorithm.custom_module, the user's file with losses and estimators.
        client: vLLM's client for weight transfer, which receives the weights in the engine (GPUs only).
    """
    if custom_module:
        load_user_module(custom_module, "algorithm.custom_module")
    master_address = str(urlsplit(placement.init_method).hostname)  # address of rank 0's node
    sender = make_weight_sender(transport, placement.rank, placement.engine_node, master_address, client)
    return PolicyWorker(config, placement, sender)


def make_teacher_model_sections(policy: Model, teacher: Teacher) -> dict[str, Model]:
    """Return the `model` section of each teacher on the policy's ranks, by its configuration key: the policy's section
    with the teacher's path, without LoRA."""
    without = {"tokenizer_path": "", "lora_rank": 0, "enable_gradient_checkpointing": False}
    return {
        key: policy.model_copy(update={"path": one.path, "trust_remote_code": one.trust_remote_code, **without})
        for key, one in teacher.local_models.items()
    }


def make_critic_model_section(policy: Model, critic: Critic) -> Model:
    """Return the critic's `model` section: the policy's section with the critic's LoRA keys and, if set, its path."""
    return policy.model_copy(update=dict(critic.model) | {"path": critic.model.path or policy.path})
