"""Construction of the policy worker, and of the teacher's and critic's model sections."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from alphaapollo.config.schema import Critic, Model, Teacher
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.weight_sync.transport import Transport, make_sender
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
from alphaapollo.workers.process_group import RankPlacement


def build_policy(
    setup: PolicyWorkerConfig, transport: Transport, custom_module: str, placement: RankPlacement, client: Any = None
) -> PolicyWorker:
    """Build a policy worker in its process.

    Args:
        custom_module: value of algorithm.custom_module.
        client: engine side of vLLM's weight transfer (GPUs only).
    """
    if custom_module:
        load_user_module(custom_module, "algorithm.custom_module")
    master_address = str(urlsplit(placement.init_method).hostname)  # address of rank 0's node
    sender = make_sender(transport, placement.rank, placement.engine_node, master_address, client)
    return PolicyWorker(setup, placement, sender)


def make_teacher_model(policy: Model, teacher: Teacher) -> Model:
    """Return the teacher's model section. Dtype and attention are those of the policy."""
    update = {"path": teacher.model.path, "trust_remote_code": teacher.model.trust_remote_code, "tokenizer_path": ""}
    return policy.model_copy(update=update | {"lora_rank": 0, "enable_gradient_checkpointing": False})


def make_critic_model(policy: Model, critic: Critic) -> Model:
    """Return the critic's model section: the policy's section with the critic's path (if it has one) and LoRA keys."""
    model = critic.model
    lora = {"lora_rank": model.lora_rank, "lora_alpha": model.lora_alpha, "target_modules": model.target_modules}
    return policy.model_copy(update={"path": model.path or policy.path} | lora)
