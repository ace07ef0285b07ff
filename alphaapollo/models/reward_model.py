"""Reward model: one score per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from alphaapollo.models.decoder import decoder_layers, hidden_states
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.sharding import FsdpRoot
from alphaapollo.models.ulysses import gather

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScoreModel(FsdpRoot):
    """Decoder and score head of a classifier with one label (models.load.load_reward_model). The head computes in
    float32."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.layers = decoder_layers(model)
        self.model, self.score = model.base_model, model.score
        self.float32_modules = (self.score,)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Score at the last token of each row, float32 [b]."""
        scores: Tensor = self.score(hidden_states(self.model, micro, micro.ends).float())
        return gather(scores.t(), micro.ends, micro.sequence)[0].clone()  # not a view, because FSDP hooks the output
