"""Self-teacher: a moving average of the policy's weights, which reads a longer prompt before the same response."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.divergence import make_divergence
from alphaapollo.algorithms.self_distillation import update_moving_average
from alphaapollo.config.schema import Model, RoleFsdp, Teacher
from alphaapollo.models.checkpoint.snapshot import CheckpointSnapshot, load_snapshot, take_snapshot
from alphaapollo.models.lm_head import DivergenceTarget
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import PolicyModel, load_policy
from alphaapollo.models.sharding import ModelMesh, local_tensor, reshard
from alphaapollo.models.training.offload import make_parameter_offloader
from alphaapollo.models.ulysses import gather_token_values

FOLDER = "teacher"  # in the policy's checkpoint


class SelfTeacher:
    """One rank of a self-teacher. All methods are collectives, called while the policy uses the GPU.

    It is loaded and sharded like the policy, so its weights are float32 and, with LoRA, it has adapters.

    Args:
        model, fsdp, mesh, seed: those of the policy.
    """

    def __init__(self, model: Model, fsdp: RoleFsdp, mesh: ModelMesh, seed: int):
        self.model = load_policy(model, mesh, getattr(torch, model.dtype), fsdp.offload_policy, seed)
        self.parameters = make_parameter_offloader(self.model, fsdp.param_offload)
        self.offload()

    @torch.no_grad()
    def make_divergence_target(self, student: MicroBatch, longer: MicroBatch, teacher: Teacher) -> DivergenceTarget:
        """Return the next-token distributions of the teacher at the response tokens of `student`.

        longer: the same rows with the teacher's prompts (Rows.teacher_rows).
        """
        self.parameters.reload()
        hidden = self.model.compute_lm_head_input(longer)
        if (sequence := student.sequence) is not None:  # a longer prompt moves tokens to other ranks
            every = gather_token_values(hidden.states.t(), longer.predicting_tokens, sequence)
            hidden = replace(hidden, states=every.t()[student.predicting_tokens.selection_indices].contiguous())
        divergence = make_divergence(teacher)
        return DivergenceTarget(hidden, divergence, True, teacher.top_k, selects_policy_tokens=True)

    @torch.no_grad()
    def follow(self, policy: PolicyModel, rate: float) -> None:
        """Move the weights towards the policy's: teacher = (1 - rate) teacher + rate policy."""
        self.parameters.reload()
        reshard(self.model)  # the gathered copies of the weights become invalid
        for own, trained in zip(self.model.parameters(), policy.parameters(), strict=True):
            if own.requires_grad:
                update_moving_average(local_tensor(own), local_tensor(trained), rate)

    def snapshot(self, checkpoint_folder: str) -> CheckpointSnapshot:
        self.parameters.reload()
        return take_snapshot(f"{checkpoint_folder}/{FOLDER}", self.model, (), {})

    def load(self, checkpoint_folder: str, policy: PolicyModel) -> None:
        """Load the weights, or copy those of the policy if the run that saved the checkpoint had no self-teacher."""
        self.parameters.reload()
        if Path(checkpoint_folder, FOLDER).is_dir():
            load_snapshot(f"{checkpoint_folder}/{FOLDER}", self.model, ())
        else:
            self.follow(policy, 1.0)

    def offload(self) -> None:
        """Free GPU memory: reshard the model and offload the configured tensors."""
        reshard(self.model)
        self.parameters.offload()


def select_taught_tokens(micro: MicroBatch) -> Tensor:
    """Return the action mask [n] without the tokens of rows for which the teacher has no context."""
    has_context = np.repeat(micro.rows.has_teacher_prompt, micro.rows.response_lengths)
    return micro.mask * torch.from_numpy(has_context).to(micro.mask.device)
