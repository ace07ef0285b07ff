"""Training on preferences on one rank: pairs of answers, or single ones with a label.

    counts [KTO: the KL on unrelated answers] -> each micro-batch: summed log-probs of whole answers -> loss of pairs

The reference's log-probs come with the batch, where they are kept; `compute_ref` makes them, before the first step.
Else they are computed beside the policy's: by a frozen second model, or with LoRA by the model without its adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.preference_losses import Answers, get_preference_loss
from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import DpoConfig, Model
from alphaapollo.data.batch import RankBatch, Rows
from alphaapollo.data.preference_batch import PreferenceBatch
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.lora import adapters_off, is_adapter
from alphaapollo.models.micro_batch import MicroBatch, build_micro_batch
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import local_tensor, reshard, shard
from alphaapollo.weight_sync.digest import tensors_digest
from alphaapollo.workers.finetuning_worker import FinetuningWorker
from alphaapollo.workers.pairs import SHARING, right_by_source
from alphaapollo.workers.process_group import MetricSums, RankPlacement
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck


class PreferenceWorker(FinetuningWorker[PreferenceBatch]):
    """One rank; see FinetuningWorker."""

    model: PolicyModel

    def __init__(
        self,
        config: DpoConfig,
        model: Model,
        placement: RankPlacement,
        optimizer_steps: int,
        saves_in_background: bool = False,
    ):
        super().__init__(config, model, placement, optimizer_steps, saves_in_background)
        self.preference, self.preference_loss = config.preference, get_preference_loss(config.preference.loss)
        self.sharing = SharedPromptCheck(
            self.model,
            self.model.model,
            lambda micro: self.model(micro, 1.0).logprobs,
            self.dtype,
            self.padded,
            self.device,
            self.groups.sequence,
            SHARING,
        )
        live = self.preference_loss.needs_reference and config.preference.reference == "live"
        self.reference = self._load_reference() if live and not model.lora_rank else None

    @torch.no_grad()
    def compute_ref(self, batch: RankBatch) -> np.ndarray:
        """The reference's log-probs of whole answers, before the first step. float64 [R]"""
        sums = np.empty(len(batch.rows))
        with self._as_reference() as reference:
            for mini_batch in batch.mini_batches:
                for positions in mini_batch.micro_batches:
                    micro = self._micro_batch(batch.rows, positions)
                    logp, _ = _answers(micro, reference(micro, 1.0).logprobs)
                    sums[positions] = logp.cpu().numpy()
        reshard(self.model)
        return sums

    def weights_digest(self) -> int:
        """Of this rank's slices of what the reference computes with, before the first step; those of all ranks add up
        (modulo 2**64)."""
        shards = self.groups.shards
        if shards.ndim > 1 and shards.get_local_rank("replicate"):
            return 0
        named = self.model.named_parameters()
        return tensors_digest(local_tensor(tensor.detach()) for name, tensor in named if not is_adapter(name))

    def counts(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        """Pairs (single answers), trained tokens, and of single answers the summed log-ratios of unrelated ones."""
        compared = len(batch.rows) // (2 if self.preference_loss.of_pairs else 1)
        counts = {"compared": torch.tensor(compared), "tokens": torch.tensor(int(batch.rows.action_mask.sum()))}
        if self.preference_loss.of_pairs:
            return counts
        return counts | {"kl": self._unrelated_log_ratio(batch)}

    def loss(
        self, batch: PreferenceBatch, positions: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.sharing.check_batch(batch)
        micro = self._micro_batch(batch.rows, positions)
        ref_logp = self._ref_logp(batch.ref_logps, micro, positions)
        logp, lengths = _answers(micro, self.model(micro, 1.0).logprobs)
        answers = Answers(
            logp=logp,
            lengths=lengths,
            good=torch.from_numpy(batch.good[positions]).to(self.device),
            ref_logp=ref_logp,
            kl=None if self.preference_loss.of_pairs else torch.tensor(counts["kl"] / counts["compared"]),
        )
        judged = self.preference_loss(answers, self.preference)
        figures = judged.figures | right_by_source(batch, positions, judged.right)
        return judged.losses.sum() / counts["compared"], figures

    @torch.no_grad()
    def _unrelated_log_ratio(self, batch: PreferenceBatch) -> Tensor:
        """KTO's sum of log pi/ref over answers to other prompts, this rank's."""
        assert batch.unrelated is not None, "single answers bring unrelated ones along"
        sums = MetricSums()
        for mini_batch in batch.unrelated.mini_batches:
            for positions in mini_batch.micro_batches:
                micro = self._micro_batch(batch.unrelated.rows, positions)
                logp, _ = _answers(micro, self.model(micro, 1.0).logprobs)
                ref = self._ref_logp(batch.unrelated_ref_logps, micro, positions)
                assert ref is not None, "KTO has a reference"
                sums.add({"kl": (logp - ref).sum()})
        reshard(self.model)
        return sums.totals["kl"]

    def _ref_logp(self, kept: np.ndarray | None, micro: MicroBatch, positions: list[int]) -> Tensor | None:
        """Of the rows of a micro-batch. [b]; None: the loss has no reference."""
        if not self.preference_loss.needs_reference:
            return None
        if kept is not None:
            return torch.from_numpy(kept[positions]).to(self.device)
        with torch.no_grad(), self._as_reference() as reference:
            return _answers(micro, reference(micro, 1.0).logprobs)[0]

    @contextmanager
    def _as_reference(self) -> Iterator[PolicyModel]:
        if self.reference is not None:
            yield self.reference
            return
        with adapters_off(self.model):  # without LoRA: the model, as long as no step was made
            assert self.config.lora_rank or not self.state.num_steps, "the model is no longer its own reference"
            yield self.model

    def _load_reference(self) -> PolicyModel:
        first = self.placement.rank == 0
        loaded = load_causal_lm(self.config, chosen_attention(self.config), self.dtype, first)
        reference = PolicyModel(loaded).requires_grad_(False)
        mesh, offload = self.groups.shards, self.fsdp.offload_policy
        shard(reference, decoder_layers(loaded), mesh, self.dtype, offload, PolicyModel.forward_methods)
        return reference

    def _micro_batch(self, rows: Rows, positions: list[int]) -> MicroBatch:
        return build_micro_batch(rows, positions, self.padded, self.device, sequence=self.groups.sequence)


def _answers(micro: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the summed log-prob of its trained tokens, and their number; none of the dummy. float64 [b] each"""
    masked = torch.where(micro.mask.bool(), logprobs, 0.0).double()
    sums = micro.to_matrix(masked).sum(dim=1)
    lengths = micro.to_matrix(micro.mask).sum(dim=1).double()
    return (sums[:0], lengths[:0]) if micro.is_dummy else (sums, lengths)
