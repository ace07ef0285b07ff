"""Construction of the policy worker in its process, and the sections of models that follow from the policy's."""

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
    """Build a policy worker.

    Args:
        custom_module: algorithm.custom_module.
        client: engine side of vLLM's own weight transfer, on GPUs.
    """
    if custom_module:
        load_user_module(custom_module, "algorithm.custom_module")
    master_address = str(urlsplit(placement.init_method).hostname)  # the node of rank 0
    sender = make_sender(transport, placement.rank, placement.engine_node, master_address, client)
    return PolicyWorker(setup, placement, sender)


def make_teacher_model(policy: Model, teacher: Teacher) -> Model:
    """The teacher's model section: with the policy's dtype and attention."""
    own = {"path": teacher.model.path, "trust_remote_code": teacher.model.trust_remote_code, "tokenizer_path": ""}
    return policy.model_copy(update=own | {"lora_rank": 0, "enable_gradient_checkpointing": False})


def make_critic_model(policy: Model, critic: Critic) -> Model:
    """The critic's model section: loaded as the policy, by default the same model, with adapters of its own."""
    own = critic.model
    lora = {"lora_rank": own.lora_rank, "lora_alpha": own.lora_alpha, "target_modules": own.target_modules}
    return policy.model_copy(update={"path": own.path or policy.path} | lora)
