"""Training a reward model on one rank: the better answer of a pair is to have the higher score (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alphaapollo.algorithms.bradley_terry import bradley_terry
from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import LoraForm, Model, RmConfig
from alphaapollo.data.preference_batch import PreferenceBatch
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.export.hf_folder import export
from alphaapollo.models.lora import load_trainable_reward_model
from alphaapollo.models.micro_batch import build_micro_batch
from alphaapollo.models.reward_model import RewardModel
from alphaapollo.models.sharding import shard
from alphaapollo.workers.finetuning_worker import FinetuningWorker
from alphaapollo.workers.pairs import SHARING, right_by_source
from alphaapollo.workers.process_group import RankPlacement
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck


class RewardTrainingWorker(FinetuningWorker[PreferenceBatch]):
    """One rank; see FinetuningWorker. The rows of its batches have a response of one token, the last: there the score is."""

    model: RewardModel

    def __init__(
        self,
        config: RmConfig,
        model: Model,
        placement: RankPlacement,
        optimizer_steps: int,
        saves_in_background: bool = False,
    ):
        super().__init__(config, model, placement, optimizer_steps, saves_in_background)
        self.centring = config.bradley_terry.centring_coef
        self.sharing = SharedPromptCheck(
            self.model,
            self.classifier,
            self.model,
            self.dtype,
            self.padded,
            self.device,
            self.groups.sequence,
            SHARING,
        )

    def load_model(self) -> None:
        """The classifier as transformers has it is kept for its names; our forward pass takes its parts."""
        attention, first = chosen_attention(self.config), self.placement.rank == 0
        loaded = load_trainable_reward_model(self.config, attention, self.dtype, materialize=first, seed=self.seed)
        layers = decoder_layers(loaded)
        self.classifier, self.model = loaded, RewardModel(loaded)
        mesh, head = self.groups.shards, self.model.score
        shard(self.model, layers, mesh, self.dtype, self.fsdp.offload_policy, exact=[head])
        self.self_check_warnings = []

    def counts(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        """Pairs, and the tokens that are read."""
        return {"compared": torch.tensor(len(batch.rows) // 2), "tokens": torch.tensor(int(batch.rows.lengths.sum()))}

    def loss(
        self, batch: PreferenceBatch, positions: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.sharing.check_batch(batch)
        micro = build_micro_batch(batch.rows, positions, self.padded, self.device, sequence=self.groups.sequence)
        scores = self.model(micro)[: 0 if micro.is_dummy else None]
        margins = torch.from_numpy(batch.margins[positions[::2]]).to(self.device)
        chosen, rejected = scores[0::2].double(), scores[1::2].double()
        losses = bradley_terry(chosen, rejected, margins, self.centring)
        right = chosen > rejected
        sums = {
            "loss": losses.sum(),
            "score_chosen": chosen.sum(),
            "score_rejected": rejected.sum(),
            "score_square": scores.double().square().sum(),
        }
        return losses.sum() / counts["compared"], sums | right_by_source(batch, positions, right)

    def export(self, folder: str, form: LoraForm = "merged") -> None:
        """A sequence classifier as transformers saves it: what reward_model.model.path takes. FloatingPointError:
        ruined weights."""
        self.state.check_finite()
        export(folder, self.classifier, self.config, self.dtype, form)
