"""Workers of reward models: scores of a frozen one, and training with pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.preference_losses import bradley_terry
from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import PreferenceBatch
from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import FrozenFsdp, Model, RmConfig
from alphaapollo.models.load import load_reward_model
from alphaapollo.models.lora import load_trainable_reward_model
from alphaapollo.models.policy import ScoreModel
from alphaapollo.models.sharding import reshard, shard_model
from alphaapollo.models.train_state import make_parameter_offloader
from alphaapollo.workers.finetuning_worker import FinetuningWorker
from alphaapollo.workers.model_worker import ModelWorker, compute_token_outputs
from alphaapollo.workers.preference import count_correct_by_source
from alphaapollo.workers.process_group import RankPlacement
from alphaapollo.workers.shared_prompt_check import FINETUNING_KEY, SharedPromptCheck


class RewardModelWorker(ModelWorker):
    """Worker that computes scores with one rank of a frozen reward model."""

    def __init__(self, model: Model, fsdp: FrozenFsdp, placement: RankPlacement):
        super().__init__(model, placement)
        attention = get_attention_kernel(model)
        root = ScoreModel(load_reward_model(model, attention, self.dtype)).requires_grad_(False)
        self.model = shard_model(
            root, lambda: ScoreModel(load_reward_model(model, attention)), self.mesh, self.dtype, fsdp.offload_policy
        )
        self.parameters = make_parameter_offloader(self.model, fsdp.param_offload)
        self.offload()

    def compute_scores(self, batch: RankBatch) -> np.ndarray:
        """Compute the score of each of R token sequences, whose response must be the last token. float32 [R]"""
        self.parameters.reload()
        return compute_token_outputs(self.model, self.model, batch.rows, batch.mini_batches, self.builder)

    def offload(self) -> None:
        """Free GPU memory for other workers: reshard the model and offload the configured tensors."""
        reshard(self.model)
        self.parameters.offload()
        torch.cuda.empty_cache()


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
        return {"compared": torch.tensor(len(batch.rows) // 2), "tokens": torch.tensor(int(batch.rows.lengths.sum()))}

    def compute_loss(
        self, batch: PreferenceBatch, row_indices: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.shared_prompts.begin_update(batch)
        micro = self.builder.build(batch.rows, row_indices)
        scores = micro.drop_dummy_row(self.model(micro))
        margins = torch.from_numpy(batch.margins[row_indices[::2]]).to(self.device)
        chosen, rejected = scores[0::2].double(), scores[1::2].double()
        losses = bradley_terry(chosen, rejected, margins, self.centring)
        sums = {
            "loss": losses.sum(),
            "score_chosen": chosen.sum(),
            "score_rejected": rejected.sum(),
            "score_square": scores.double().square().sum(),
        }
        return losses.sum() / counts["compared"], sums | count_correct_by_source(batch, row_indices, chosen > rejected)
