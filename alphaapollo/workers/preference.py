"""Preference training worker, for pairs of answers (DPO and others) or single labelled answers (KTO).

    compute_loss_denominators [KTO: KL on answers to other prompts] -> for each micro-batch: answer log-probs -> loss

Reference log-probs come with the batch if they were computed before the first step (`compute_ref_log_probs`).
Otherwise each step computes them with a frozen second model or, if LoRA is used, with the model without its adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.preference_losses import AnswerBatch, get_preference_loss
from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.preference_batch import PreferenceBatch
from alphaapollo.config.schema import DpoConfig
from alphaapollo.models.lora import disable_adapters, is_adapter_parameter
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import PolicyModel, load_policy
from alphaapollo.models.sharding import local_tensor, reshard
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.weight_sync.digest import compute_joint_digest
from alphaapollo.workers.finetuning_worker import FinetuningWorker
from alphaapollo.workers.shared_prompt_check import FINETUNING_KEY, SharedPromptCheck


class PreferenceWorker(FinetuningWorker[PreferenceBatch]):
    """Worker that trains one rank in preference training."""

    tuning: DpoConfig
    model: PolicyModel

    def load_model(self) -> None:
        """Load the model. If steps compute reference log-probs and LoRA is off, also load a frozen reference model."""
        super().load_model()
        self.preference = self.tuning.preference
        if self.preference.custom_module:
            load_user_module(self.preference.custom_module, "preference.custom_module")
        self.preference_loss = get_preference_loss(self.preference.loss)
        self.shared_prompts = SharedPromptCheck(
            self.model, self.model.make_logprobs_function(1.0), self.builder, self.dtype, FINETUNING_KEY
        )
        self.reference: PolicyModel | None = None
        is_live = self.preference_loss.needs_reference and self.preference.reference == "live"
        if is_live and not self.config.lora_rank:
            offload = self.tuning.fsdp_config.offload_policy
            self.reference = load_policy(self.config, self.mesh, self.dtype, offload)

    @torch.no_grad()
    def compute_ref_log_probs(self, batch: RankBatch) -> np.ndarray:
        """Compute the reference log-prob of each of R answers (sum over its tokens). float64 [R]"""
        sums = np.empty(len(batch.rows))
        with self._use_reference_model() as reference:
            for mini_batch in batch.mini_batches:
                for row_indices in mini_batch.micro_batches:
                    micro = self.builder.build(batch.rows, row_indices)
                    logp, _ = _sum_answer_logprobs(micro, reference(micro, 1.0).logprobs)
                    sums[row_indices] = logp.cpu().numpy()
        reshard(self.model)
        return sums

    def compute_weights_digest(self) -> int:
        """Return this rank's part of the base model's digest. The caller adds the parts of all ranks modulo 2**64."""
        if not self.mesh.is_first_replica():
            return 0
        named = self.model.named_parameters()
        return compute_joint_digest(
            local_tensor(tensor.detach()) for name, tensor in named if not is_adapter_parameter(name)
        )

    def compute_loss_denominators(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        """Count this rank's pairs (or single answers) and tokens. For KTO, also sum the log-ratios for the KL."""
        compared = len(batch.rows) // (2 if self.preference_loss.is_pairwise else 1)
        counts = {"compared": torch.tensor(compared), "tokens": torch.tensor(int(batch.rows.action_mask.sum()))}
        if self.preference_loss.is_pairwise:
            return counts
        return counts | {"kl": self._sum_log_ratios_of_unrelated_answers(batch)}

    def compute_loss(
        self, batch: PreferenceBatch, row_indices: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.shared_prompts.begin_update(batch)
        micro = self.builder.build(batch.rows, row_indices)
        ref_logp = self._get_ref_logp(batch.ref_logps, micro, row_indices)
        logp, lengths = _sum_answer_logprobs(micro, self.model(micro, 1.0).logprobs)
        answers = AnswerBatch(
            logp=logp,
            lengths=lengths,
            is_desirable=torch.from_numpy(batch.is_good[row_indices]).to(self.device),
            ref_logp=ref_logp,
            kl=None if self.preference_loss.is_pairwise else torch.tensor(counts["kl"] / counts["compared"]),
        )
        output = self.preference_loss(answers, self.preference)
        metrics = output.metric_sums | count_correct_by_source(batch, row_indices, output.is_correct)
        return output.losses.sum() / counts["compared"], metrics

    @torch.no_grad()
    def _sum_log_ratios_of_unrelated_answers(self, batch: PreferenceBatch) -> Tensor:
        """Sum log(policy / reference) of this rank's prompts paired with another prompt's answer. float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for mini_batch in batch.unrelated_answers.mini_batches:
            for row_indices in mini_batch.micro_batches:
                micro = self.builder.build(batch.unrelated_answers.rows, row_indices)
                logp, _ = _sum_answer_logprobs(micro, self.model(micro, 1.0).logprobs)
                ref = self._get_ref_logp(batch.unrelated_ref_logps, micro, row_indices)
                assert ref is not None, "KTO needs a reference"
                total += (logp - ref).sum()
        reshard(self.model)
        return total

    def _get_ref_logp(self, precomputed: np.ndarray | None, micro: MicroBatch, row_indices: list[int]) -> Tensor | None:
        """Return the reference log-prob of each answer of a micro-batch, [b]. None if the loss needs no reference."""
        if not self.preference_loss.needs_reference:
            return None
        if precomputed is not None:
            return torch.from_numpy(precomputed[row_indices]).to(self.device)
        with torch.no_grad(), self._use_reference_model() as reference:
            return _sum_answer_logprobs(micro, reference(micro, 1.0).logprobs)[0]

    @contextmanager
    def _use_reference_model(self) -> Iterator[PolicyModel]:
        if self.reference is not None:
            yield self.reference
            return
        with disable_adapters(self.model):  # without LoRA: the model itself before its first step
            assert self.config.lora_rank or not self.state.num_steps, "a trained model cannot be the reference"
            yield self.model


def _sum_answer_logprobs(micro: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed log-prob and the number of tokens of each answer of a micro-batch, float64 [b] each."""
    masked = torch.where(micro.mask.bool(), logprobs, 0.0).double()
    sums = micro.to_matrix(masked).sum(dim=1)
    lengths = micro.to_matrix(micro.mask).sum(dim=1).double()
    return micro.drop_dummy_row(sums), micro.drop_dummy_row(lengths)


def count_correct_by_source(batch: PreferenceBatch, row_indices: list[int], correct: Tensor) -> dict[str, Tensor]:
    """Count the True values of `correct` [pairs, or single answers], also per data source if there are several."""
    sums = {"right": correct.sum()}
    if len(batch.source_names) == 1:
        return sums
    step = len(row_indices) // len(correct) if len(correct) else 1
    sources = torch.from_numpy(batch.sources[row_indices[::step]])
    correct = correct.cpu()
    for index, name in enumerate(batch.source_names):
        sums |= {f"{name}/compared": (sources == index).sum(), f"{name}/right": correct[sources == index].sum()}
    return sums
