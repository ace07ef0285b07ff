"""The critic as an FSDP root: rows in, one value before each response token out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alphaapollo.models.decoder import response_states
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CriticModel(nn.Module):
    """The trunk of a causal language model under a fresh value head.

    The head computes in float32: near 1 bfloat16 has steps of 0.004 to 0.008, and GAE adds up differences of values.
    """

    forward_methods = ()

    def __init__(self, model: PreTrainedModel, seed: int):
        """The head is drawn from N(0, 1 / (H + 1)^2), so that first values are near zero, as a function of `seed`."""
        super().__init__()
        self.model = model.base_model
        size = model.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(derive_seed(seed, "value_head"))
        weight = torch.randn(1, size, generator=generator) / (size + 1)
        parameter = next(self.model.parameters())
        exactly = torch.promote_types(parameter.dtype, torch.float32)
        self.value_head = nn.Linear(size, 1, device=parameter.device, dtype=exactly)
        if not parameter.is_meta:
            self.value_head.weight.data.copy_(weight)
            self.value_head.bias.data.zero_()

    def forward(self, micro: MicroBatch) -> Tensor:
        """The value of the state before each response token, float32 (float64 stays) [n]."""
        states = response_states(self.model, micro)
        values: Tensor = self.value_head(states.to(torch.promote_types(states.dtype, torch.float32)))
        return micro.gather(values.t(), micro.states)[0].clone()  # no view: FSDP hooks the output
