"""Model FLOP/s utilization (MFU): FLOPs of training by the peak FLOP/s of the GPU (arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from alphaapollo.batching.batch import MiniBatch, Rows
from alphaapollo.config.schema.planned_device import find_gpu
from alphaapollo.models.decoder import find_vision_modules, get_attention_head_size
from alphaapollo.models.moe_routing import ExpertSizes
from alphaapollo.models.quantized import QuantizedLinear

EXPERTS = ".experts."  # in names of expert parameters, stacked or separate, but not of shared experts


@dataclass(frozen=True)
class FlopsEstimator:
    """Estimator of the FLOPs of training, from the sizes of a language model. A vision tower does not count."""

    num_parameters: int  # parameters of the matrices that each token is multiplied with, including the head
    num_trained: int  # parameters among these that have a gradient; with LoRA the adapters
    num_layers: int
    attention_width: int  # heads x head size

    @classmethod
    def from_model(cls, model: Any) -> FlopsEstimator | None:
        """Build an estimator from a model's parameters; None for an MoE model with an unknown number of experts."""
        config = model.config.get_text_config()
        experts = ExpertSizes.from_config(model.config)
        vision_ids = {id(parameter) for part in find_vision_modules(model) for parameter in part.parameters()}
        text_parameters = ((name, p) for name, p in model.named_parameters() if id(p) not in vision_ids)
        scales = {f"{name}.scale" for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
        matrices = {
            name: parameter for name, parameter in text_parameters if parameter.ndim >= 2 and name not in scales
        }
        if experts is None and any(EXPERTS in name for name in matrices):
            return None
        if not model.config.tie_word_embeddings:
            embedding = model.get_input_embeddings().weight  # a lookup, not a product
            matrices = {name: parameter for name, parameter in matrices.items() if parameter is not embedding}

        def count_active_parameters(name: str, parameter: torch.Tensor) -> int:
            count: int = parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)  # codes of 4 bits
            return count * experts.experts_per_token // experts.num_experts if experts and EXPERTS in name else count

        counts = [(count_active_parameters(name, p), p.requires_grad) for name, p in matrices.items()]
        total = sum(count for count, _ in counts)
        trained = sum(count for count, is_trained in counts if is_trained)
        width = config.num_attention_heads * get_attention_head_size(config)
        return cls(total, trained, config.num_hidden_layers, width)

    def estimate_training_flops(self, lengths: np.ndarray, prefix_lengths: np.ndarray | int = 0) -> float:
        """Estimate the FLOPs of forward and backward passes over sequences of `lengths` tokens.

        Each token takes 4 FLOPs per parameter and 2 more per trained parameter. Causal attention takes 6 FLOPs per
        pair of tokens, layer and unit of attention width. `prefix_lengths`: lengths of shared prompts, to which the
        sequences attend, but which are not computed again for them.
        """
        ends, starts = lengths.astype(np.float64) + prefix_lengths, np.asarray(prefix_lengths, dtype=np.float64)
        squares = float(np.square(ends).sum() - np.square(np.broadcast_to(starts, ends.shape)).sum())
        attention = 6.0 * self.num_layers * self.attention_width * squares
        products = 4.0 * self.num_parameters + 2.0 * self.num_trained
        return products * float(lengths.sum()) + attention


class MfuMeter:
    """Model FLOP/s utilization of an update, on GPUs with known peak FLOP/s."""

    def __init__(self, model: Any, device: str):
        gpu = find_gpu(torch.cuda.get_device_name()) if device == "cuda" else None
        self.peak = 1e12 * gpu.tflops if gpu else None
        self.estimator = FlopsEstimator.from_model(model)

    def begin_update(self) -> None:
        self.flops, self.started = 0.0, time.perf_counter()

    def add(self, rows: Rows, mini_batches: Sequence[MiniBatch]) -> None:
        """Count the FLOPs of training on mini-batches."""
        if self.peak is not None and self.estimator is not None:
            for micro in (micro for mini_batch in mini_batches for micro in mini_batch.micro_batches):
                self.flops += self.estimator.estimate_training_flops(*rows.get_segment_and_prefix_lengths(micro))

    def compute_metrics(self, num_sharing_ranks: int) -> dict[str, float]:
        """Compute the utilization since `begin_update`, of `num_sharing_ranks` ranks that share the sequences."""
        if not self.flops or self.peak is None:
            return {}
        return {"perf/mfu/actor": self.flops / num_sharing_ranks / (time.perf_counter() - self.started) / self.peak}
