"""Models with one output: a critic computes a value per response token, a reward model a score per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alphaapollo.models.decoder import compute_hidden_states, find_decoder_layers
from alphaapollo.models.load import draw_head
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.sharding import FsdpRoot
from alphaapollo.models.ulysses import gather_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(FsdpRoot):
    """Critic: decoder of a causal language model with a new value head, drawn by `seed`.

    The head computes in float32, because GAE sums differences of values and bfloat16 has steps of 0.004 near 1.
    """

    def __init__(self, model: PreTrainedModel, seed: int):
        super().__init__()
        self.layers = find_decoder_layers(model)
        self.model = model.base_model
        parameter = next(self.model.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=parameter.device, dtype=dtype)
        self.float32_modules = (self.value_head,)
        if not parameter.is_meta:
            draw_head(self.value_head, seed, "value_head")
            self.value_head.bias.data.zero_()

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute the value of the state before each response token. float32 or float64 [n]"""
        states = compute_hidden_states(self.model, micro, micro.states)
        values: Tensor = self.value_head(states.to(torch.promote_types(states.dtype, torch.float32)))
        return gather_columns(values.t(), micro.states, micro.sequence)[0].clone()  # FSDP hooks the output, so no view


class ScoreModel(FsdpRoot):
    """Reward model: decoder and score head of a classifier with one label (models.load.load_reward_model). The head
    computes in float32."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.layers = find_decoder_layers(model)
        self.model, self.score = model.base_model, model.score
        self.float32_modules = (self.score,)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute the score at the last token of each row. float32 [b]"""
        scores: Tensor = self.score(compute_hidden_states(self.model, micro, micro.ends).float())
        return gather_columns(scores.t(), micro.ends, micro.sequence)[0].clone()  # FSDP hooks the output, so no view
