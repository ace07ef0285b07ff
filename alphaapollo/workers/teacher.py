"""Teacher for on-policy distillation: a frozen model on the policy's ranks, applied to the policy's samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.divergence import make_divergence
from alphaapollo.config.schema import FrozenFsdp, Model, Teacher
from alphaapollo.data.batch import RankBatch
from alphaapollo.models.lm_head import DivergenceTarget, LmHeadInput, TokenStats
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.policy import check_forward_vs_hf, load_policy
from alphaapollo.models.sharding import ModelMesh, reshard
from alphaapollo.models.training.offload import make_parameter_offloader
from alphaapollo.workers.columns import compute_token_outputs
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck


class FrozenTeacher:
    """One rank of the teacher model. All methods are collectives, called while the policy uses the GPU.

    Args:
        model: model section after `resolve_model`, with the teacher's path and the policy's dtype and attention.
        temperature: temperature of the rollouts.
        vocabulary_size: output size of the policy's head, which must not exceed that of the teacher's head.
    """

    def __init__(
        self,
        model: Model,
        fsdp: FrozenFsdp,
        mesh: ModelMesh,
        builder: MicroBatchBuilder,
        temperature: float,
        vocabulary_size: int,
    ):
        self.builder, self.vocabulary = builder, vocabulary_size
        dtype: torch.dtype = getattr(torch, model.dtype)
        self.model = load_policy(model, ModelMesh(mesh.dense), dtype, fsdp.offload_policy)
        check_forward_vs_hf(self.model, builder, dtype)
        self.compute_logprobs = self.model.make_logprobs_function(temperature, replays_routing=False)
        self.sharing = SharedPromptCheck(self.model, self.compute_logprobs, builder, dtype)
        self.parameters = make_parameter_offloader(self.model, fsdp.param_offload)
        self.offload()

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        """Compute log-probs of the response tokens, then offload the teacher. float32 [response tokens]"""
        self.reload_and_check_batch(batch)
        column = compute_token_outputs(self.model, self.compute_logprobs, batch.rows, batch.mini_batches, self.builder)
        self.offload()
        return column

    def reload_and_check_batch(self, batch: RankBatch) -> None:
        """Reload the parameters, and check that the teacher supports the shared prompts of the batch."""
        self.parameters.reload()
        self.sharing.check_batch(batch)

    @torch.no_grad()
    def make_divergence_target(self, micro: MicroBatch, teacher: Teacher) -> DivergenceTarget:
        """Return the teacher's next-token distributions, to compute the divergence of the policy's distributions."""
        hidden: LmHeadInput = self.model.compute_lm_head_input(replace(micro, routed_experts=None))
        head, count = hidden.head, self.vocabulary  # rows beyond the policy's vocabulary are padding
        bias = None if head.bias is None else head.bias[:count]
        common = replace(head, weight=head.weight[:count], bias=bias)
        return DivergenceTarget(LmHeadInput(hidden.states, common), make_divergence(teacher), with_statistics=True)

    def offload(self) -> None:
        """Free GPU memory: reshard the model and offload the configured tensors."""
        reshard(self.model)
        self.parameters.offload()


def sum_distillation_metrics(stats: TokenStats, mask: Tensor) -> dict[str, Tensor]:
    """Sum divergences etc. over the tokens in `mask` [n]. {} if the teacher's full distributions are not used."""
    if stats.reverse_kl is None:
        return {}
    names = ("divergence", "reverse_kl", "forward_kl", "agreement")
    return {f"distill/{name}": (mask * getattr(stats, name).detach()).sum() for name in names}
