"""Models with one output: a critic computes a value per response token, a reward model a score per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alphaapollo.models.decoder import compute_hidden_states, find_decoder_layers
from alphaapollo.models.load import init_scalar_head
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.sharding import FsdpRoot
from alphaapollo.models.ulysses import gather_token_values
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(FsdpRoot):
    """Critic: decoder of a causal language model with a new value head, initialized with `seed`.

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
            init_scalar_head(self.value_head, derive_seed(seed, "value_head"))
            self.value_head.bias.data.zero_()

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute the value before each of the n response tokens. float32 or float64 [n]"""
        states = compute_hidden_states(self.model, micro, micro.predicting_tokens)
        values: Tensor = self.value_head(states.to(torch.promote_types(states.dtype, torch.float32)))
        return gather_token_values(values.t(), micro.predicting_tokens, micro.sequence)[0].clone()  # no view, for FSDP


class ScoreModel(FsdpRoot):
    """Reward model: decoder and float32 score head of a classifier with one label (models.load.load_reward_model)."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.layers = find_decoder_layers(model)
        self.model, self.score = model.base_model, model.score
        self.float32_modules = (self.score,)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute the score of each of the b sequences, at its last token. float32 [b]"""
        scores: Tensor = self.score(compute_hidden_states(self.model, micro, micro.last_tokens).float())
        return gather_token_values(scores.t(), micro.last_tokens, micro.sequence)[0].clone()  # no view, for FSDP
