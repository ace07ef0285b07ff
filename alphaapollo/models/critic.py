"""Critic model: one value before each response token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alphaapollo.models.decoder import decoder_layers, hidden_states
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.sharding import FsdpRoot
from alphaapollo.models.ulysses import gather
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(FsdpRoot):
    """Decoder of a causal language model with a fresh value head.

    The head computes in float32: near 1 bfloat16 has steps of 0.004 to 0.008, and GAE sums differences of values.
    """

    def __init__(self, model: PreTrainedModel, seed: int):
        """The head's weights are drawn from N(0, 1 / (H + 1)^2) by `seed`, so that the first values are near zero."""
        super().__init__()
        self.layers = decoder_layers(model)
        self.model = model.base_model
        size = model.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(derive_seed(seed, "value_head"))
        weight = torch.randn(1, size, generator=generator) / (size + 1)
        parameter = next(self.model.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.value_head = nn.Linear(size, 1, device=parameter.device, dtype=dtype)
        self.float32_modules = (self.value_head,)
        if not parameter.is_meta:
            self.value_head.weight.data.copy_(weight)
            self.value_head.bias.data.zero_()

    def forward(self, micro: MicroBatch) -> Tensor:
        """Value of the state before each response token, float32 (float64 stays) [n]."""
        states = hidden_states(self.model, micro, micro.states)
        values: Tensor = self.value_head(states.to(torch.promote_types(states.dtype, torch.float32)))
        return gather(values.t(), micro.states, micro.sequence)[0].clone()  # not a view, because FSDP hooks the output
