"""A trained reward model as an FSDP root: rows in, one score a row out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from alphaapollo.models.decoder import states_at
from alphaapollo.models.micro_batch import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RewardModel(nn.Module):
    """The trunk and the score head of a classifier with one label (models.load.load_reward_model); the head computes in
    float32."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.score = model.base_model, model.score

    def forward(self, micro: MicroBatch) -> Tensor:
        """The score at each row's last token, float32 [b]."""
        scores: Tensor = self.score(states_at(self.model, micro, micro.ends).float())
        return micro.gather(scores.t(), micro.ends)[0].clone()  # no view: FSDP hooks the output
