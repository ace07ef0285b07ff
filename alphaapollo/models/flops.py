"""How much arithmetic training takes, and how much a GPU could do: model FLOP/s utilisation (arXiv 2204.02311, B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaapollo.models.decoder import head_size
from alphaapollo.models.moe_routing import ExpertSizes

EXPERTS = ".experts."  # in the names of parameters, whether stacked or one by one; not of shared experts

PEAK = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 9.89e14,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "H800": 9.89e14,
    "H20": 1.48e14,
    "A100": 3.12e14,
    "A800": 3.12e14,
    "L40S": 3.62e14,
    "L40": 1.81e14,
    "L4": 1.21e14,
    "A10G": 7.0e13,
    "A10": 1.25e14,
    "RTX 4090": 1.65e14,
    "RTX 3090": 7.1e13,
}
"""bfloat16 without sparsity, FLOP/s, by words of the device's name, as data sheets say. The first that fits counts."""


def peak_flops(device_name: str) -> float | None:
    """None for a device that the table does not know."""
    words = f" {device_name.replace('-', ' ').replace('NVIDIA', '')} "
    return next((peak for name, peak in PEAK.items() if f" {name} " in words), None)


@dataclass(frozen=True)
class FlopsEstimator:
    """What the arithmetic of a decoder depends on."""

    num_parameters: int  # of the matrices that a token passes, the head among them
    num_trained: int  # of these, those that get a gradient: with LoRA the adapters'
    num_layers: int
    attention_width: int  # heads x their size

    @classmethod
    def of(cls, model: Any) -> FlopsEstimator | None:
        """Of a mixture of experts those count that a token is sent to. None where their number is not known."""
        config = model.config.get_text_config()
        experts = ExpertSizes.of(model.config)
        passed = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim >= 2}
        if experts is None and any(EXPERTS in name for name in passed):
            return None
        if not config.tie_word_embeddings:
            embedding = model.get_input_embeddings().weight  # looked up, not multiplied
            passed = {name: parameter for name, parameter in passed.items() if parameter is not embedding}

        def active(name: str, parameter: Any) -> int:
            count: int = parameter.numel()
            return count * experts.chosen // experts.num_experts if experts and EXPERTS in name else count

        matrices = sum(active(name, parameter) for name, parameter in passed.items())
        trained = sum(active(name, parameter) for name, parameter in passed.items() if parameter.requires_grad)
        width = config.num_attention_heads * head_size(config)
        return cls(matrices, trained, config.num_hidden_layers, width)

    def training_flops(self, lengths: np.ndarray, before: np.ndarray | int = 0) -> float:
        """Forward and backward over sequences of these lengths: 4 a parameter and token, 2 more where it is trained,
        and 6 a layer, width and pair of tokens for causal attention. before: tokens of a shared prefix that each also
        sees."""
        seen, earlier = lengths.astype(np.float64) + before, np.asarray(before, dtype=np.float64)
        squares = float(np.square(seen).sum() - np.square(np.broadcast_to(earlier, seen.shape)).sum())
        attention = 6.0 * self.num_layers * self.attention_width * squares
        products = 4.0 * self.num_parameters + 2.0 * self.num_trained
        return products * float(lengths.sum()) + attention
