"""Workers for preference training, with pairs of answers (DPO and others) or single labelled answers (KTO), and for
reward models.

    compute_loss_denominators [KTO: KL on answers to other prompts] -> for each micro-batch: answer log-probs -> loss

Reference log-probs come with the batch; they are computed before the first step (`compute_ref_log_probs`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.preference_losses import AnswerBatch, bradley_terry, get_preference_loss
from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import PreferenceBatch
from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import DpoConfig, RmConfig
from alphaapollo.engines.weight_sync.digest import compute_joint_digest
from alphaapollo.models.lora import is_adapter_parameter, load_trainable_reward_model
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel, ScoreModel
from alphaapollo.models.sharding import local_tensor, reshard, shard_model
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.workers.finetuning_worker import FinetuningWorker
from alphaapollo.workers.shared_prompt_check import FINETUNING_KEY, SharedPromptCheck


class PreferenceWorker(FinetuningWorker[PreferenceBatch]):
    """Worker that trains one rank in preference training."""

    tuning: DpoConfig
    model: PolicyModel

    def load_model(self) -> None:
        super().load_model()
        self.preference = self.tuning.preference
        if self.preference.custom_module:
            load_user_module(self.preference.custom_module, "preference.custom_module")
        self.preference_loss = get_preference_loss(self.preference.loss)
        self.shared_prompts = SharedPromptCheck(
            self.model, self.model.make_logprobs_function(1.0), self.builder, self.dtype, FINETUNING_KEY
        )

    @torch.no_grad()
    def compute_ref_log_probs(self, batch: RankBatch) -> np.ndarray:
        """Compute the reference log-prob of each of R answers (sum over its tokens). float64 [R]

        The reference is the model before its first step, or, with LoRA, the model without its adapters.
        """
        assert self.config.lora_rank or not self.state.num_steps, "a trained model cannot be the reference"
        parts, order = [torch.zeros(0, dtype=torch.float64, device=self.device)], list[int]()
        with self.model.disable_adapters():
            for mini_batch in batch.mini_batches:
                for row_indices in mini_batch.micro_batches:
                    micro = self.builder.build(batch.rows, row_indices)
                    logp, _ = _sum_answer_logprobs(micro, self.model(micro, 1.0).logprobs)
                    parts.append(logp)
                    order += row_indices
        reshard(self.model)
        sums = np.empty(len(batch.rows))
        sums[order] = torch.cat(parts).cpu().numpy()
        return sums

    def compute_weights_digest(self) -> int:
        """Return this rank's part of the base model's digest, by which saved reference log-probs are recognized. The
        caller adds the parts of all ranks modulo 2**64."""
        if not self.mesh.is_first_replica():
            return 0
        base_parameters = [p for name, p in self.model.named_parameters() if not is_adapter_parameter(name)]
        return compute_joint_digest(local_tensor(parameter.detach()) for parameter in base_parameters)

    def compute_loss_denominators(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        """Count this rank's pairs (or single answers) and tokens. For KTO, also sum the log-ratios for the KL."""
        num_examples = len(batch.rows) // (2 if self.preference_loss.is_pairwise else 1)
        counts = {"examples": torch.tensor(num_examples), "tokens": torch.tensor(int(batch.rows.action_mask.sum()))}
        if self.preference_loss.is_pairwise:
            return counts
        return counts | {"kl": self._sum_log_ratios_of_unrelated_answers(batch)}

    def compute_loss(
        self, batch: PreferenceBatch, row_indices: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.shared_prompts.begin_update(batch)
        micro = self.builder.build(batch.rows, row_indices)
        logp, lengths = _sum_answer_logprobs(micro, self.model(micro, 1.0).logprobs)
        answers = AnswerBatch(
            logp=logp,
            lengths=lengths,
            is_desirable=self.builder.to_device(batch.is_good[row_indices]),
            ref_logp=None if batch.ref_logps is None else self.builder.to_device(batch.ref_logps[row_indices]),
            kl=None if self.preference_loss.is_pairwise else torch.tensor(counts["kl"] / counts["examples"]),
        )
        output = self.preference_loss(answers, self.preference)
        metrics = output.metric_sums | count_correct_by_source(batch, row_indices, output.is_correct, self.builder)
        return output.losses.sum() / counts["examples"], metrics

    @torch.no_grad()
    def _sum_log_ratios_of_unrelated_answers(self, batch: PreferenceBatch) -> Tensor:
        """Sum log(policy / reference) of this rank's prompts paired with another prompt's answer. float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for mini_batch in batch.unrelated_answers.mini_batches:
            for row_indices in mini_batch.micro_batches:
                micro = self.builder.build(batch.unrelated_answers.rows, row_indices)
                logp, _ = _sum_answer_logprobs(micro, self.model(micro, 1.0).logprobs)
                assert batch.unrelated_ref_logps is not None, "KTO needs a reference"
                total += (logp - self.builder.to_device(batch.unrelated_ref_logps[row_indices])).sum()
        reshard(self.model)
        return total


def _sum_answer_logprobs(micro: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed log-prob and the number of tokens of each answer of a micro-batch, float64 [b] each."""
    masked = torch.where(micro.mask.bool(), logprobs, 0.0).double()
    sums = micro.to_matrix(masked).sum(dim=1)
    lengths = micro.to_matrix(micro.mask).sum(dim=1).double()
    return micro.drop_dummy_row(sums), micro.drop_dummy_row(lengths)


def count_correct_by_source(
    batch: PreferenceBatch, row_indices: list[int], correct: Tensor, builder: MicroBatchBuilder
) -> dict[str, Tensor]:
    """Count the True values of `correct` [pairs, or single answers], also per data source if there are several."""
    sums = {"right": correct.sum()}
    if len(batch.source_names) == 1:
        return sums
    rows_per_example = len(row_indices) // len(correct) if len(correct) else 1
    sources = builder.to_device(batch.sources[row_indices[::rows_per_example]])
    for index, name in enumerate(batch.source_names):
        is_from_source = sources == index
        sums |= {f"{name}/examples": is_from_source.sum(), f"{name}/right": (correct & is_from_source).sum()}
    return sums


class RewardTrainingWorker(FinetuningWorker[PreferenceBatch]):
    """Worker that trains one rank of a reward model. The score of an answer is read at its last token."""

    tuning: RmConfig
    model: ScoreModel

    def load_model(self) -> None:
        """Load and shard the model: a sequence classifier of transformers with one label."""
        settings = self.config, get_attention_kernel(self.config)
        seed, offload = self.tuning.trainer.seed, self.tuning.fsdp_config.offload_policy

        def load_weights() -> ScoreModel:
            return ScoreModel(load_trainable_reward_model(*settings, None, seed))

        self.hf_model = load_trainable_reward_model(*settings, self.dtype, seed)
        self.model = shard_model(ScoreModel(self.hf_model), load_weights, self.mesh, self.dtype, offload)
        self.centring = self.tuning.bradley_terry.centring_coef
        self.shared_prompts = SharedPromptCheck(self.model, self.model, self.builder, self.dtype, FINETUNING_KEY)

    def compute_loss_denominators(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        return {"examples": torch.tensor(len(batch.rows) // 2), "tokens": torch.tensor(int(batch.rows.lengths.sum()))}

    def compute_loss(
        self, batch: PreferenceBatch, row_indices: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.shared_prompts.begin_update(batch)
        micro = self.builder.build(batch.rows, row_indices)
        scores = micro.drop_dummy_row(self.model(micro))
        margins = self.builder.to_device(batch.margins[row_indices[::2]])
        chosen, rejected = scores[0::2].double(), scores[1::2].double()
        losses = bradley_terry(chosen, rejected, margins, self.centring)
        sums = {
            "loss": losses.sum(),
            "score_chosen": chosen.sum(),
            "score_rejected": rejected.sum(),
            "score_square": scores.double().square().sum(),
        }
        correct = count_correct_by_source(batch, row_indices, chosen > rejected, self.builder)
        return losses.sum() / counts["examples"], sums | correct
