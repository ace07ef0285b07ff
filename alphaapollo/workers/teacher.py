"""The teacher on one training rank: a frozen model that looks at the policy's own samples, beside the policy.

Its methods are collectives of all ranks, within the policy's phase; they reload what rests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.divergence import divergence_of
from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import FrozenFsdp, Model, Teacher
from alphaapollo.data.batch import RankBatch
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.lm_head import Hidden, Other, TokenStats
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import PolicyModel, check_logprobs
from alphaapollo.models.sharding import reshard, shard
from alphaapollo.models.training.offload import parameter_offload
from alphaapollo.workers.process_group import RankGroups, RankPlacement, compute_column, torch_dtype
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck


class TeacherModel:
    """One rank of the teacher.

    Args:
        model: how it is loaded, with its path.
        fsdp: where its parameters are between phases, and in one.
        temperature: of the rollouts.
        vocabulary: of the policy's head, which its own covers.
    """

    def __init__(
        self,
        model: Model,
        fsdp: FrozenFsdp,
        groups: RankGroups,
        placement: RankPlacement,
        temperature: float,
        vocabulary: int,
    ):
        self.groups, self.device = groups, torch.device(placement.device)
        self.temperature, self.vocabulary = temperature, vocabulary
        self.padded, dtype = model.attention == "padded", torch_dtype(model)
        loaded = load_causal_lm(model, chosen_attention(model), dtype, materialize=placement.rank == 0)
        layers = decoder_layers(loaded)
        self.model = PolicyModel(loaded).requires_grad_(False)
        shard(self.model, layers, groups.shards, dtype, fsdp.offload_policy, PolicyModel.forward_methods)
        check_logprobs(self.model, self.padded, dtype, self.device, groups.sequence)
        self.sharing = SharedPromptCheck(
            self.model, loaded, self._logprobs_of, dtype, self.padded, self.device, groups.sequence
        )
        self.parameters = parameter_offload(self.model, fsdp.param_offload)
        self.offload()

    def log_probs(self, batch: RankBatch) -> np.ndarray:
        """Of the response tokens, at the rollouts' temperature; its phase ends. float32 [sum responses]"""
        self.begin(batch)
        sequence = self.groups.sequence
        column = compute_column(
            self.model, self._logprobs_of, batch.rows, batch.mini_batches, self.padded, self.device, sequence
        )
        self.offload()
        return column

    def begin(self, batch: RankBatch) -> None:
        """Its phase, or an update that compares whole distributions, begins; `rest` ends it."""
        self.parameters.reload()
        self.sharing.check_batch(batch)

    @torch.no_grad()
    def distribution(self, micro: MicroBatch, teacher: Teacher) -> Other:
        """What the policy's head is to compare itself with."""
        hidden: Hidden = self.model.hidden(_own(micro))
        head, count = hidden.head, self.vocabulary
        bias = None if head.bias is None else head.bias[:count]
        common = replace(head, weight=head.weight[:count], bias=bias)  # what lies beyond fills up its rows
        return Other(Hidden(hidden.states, common), divergence_of(teacher), shown=True)

    def offload(self) -> None:
        """Nothing stays gathered, and what is offloaded goes to host memory."""
        reshard(self.model)
        self.parameters.offload()

    def _logprobs_of(self, micro: MicroBatch) -> Tensor:
        logprobs: Tensor = self.model(_own(micro), self.temperature).logprobs
        return logprobs


def _own(micro: MicroBatch) -> MicroBatch:
    """Without the experts that the policy's routers chose."""
    return replace(micro, routed_experts=None)


def teaching_figures(stats: TokenStats, mask: Tensor) -> dict[str, Tensor]:
    """MetricSums over action tokens; mask [n]. Nothing where no whole distributions were compared with a teacher's."""
    named = {
        "divergence": stats.divergence,
        "reverse_kl": stats.reverse_kl,
        "forward_kl": stats.forward_kl,
        "agreement": stats.agreement,
    }
    if stats.reverse_kl is None:
        return {}
    return {f"distill/{name}": (mask * column.detach()).sum() for name, column in named.items() if column is not None}
