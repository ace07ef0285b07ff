"""Model FLOP/s utilization (MFU): FLOPs of training, and peak FLOP/s of GPUs (arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from alphaapollo.batching.batch import MiniBatch, Rows
from alphaapollo.models.decoder import find_vision_modules, get_attention_head_size
from alphaapollo.models.moe_routing import ExpertSizes

EXPERTS = ".experts."  # in names of expert parameters, stacked or separate, but not of shared experts


class GpuSpeed(NamedTuple):
    """Speed of a GPU according to its data sheet."""

    flops: float  # dense bfloat16 FLOP/s
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s from other GPUs of its node, in one direction: NVLink or PCIe


GPU_SPEEDS = {
    "GB200": GpuSpeed(2.5e15, 8e12, 9e11),
    "B200": GpuSpeed(2.25e15, 8e12, 9e11),
    "GH200": GpuSpeed(9.89e14, 4.9e12, 4.5e11),
    "H200": GpuSpeed(9.89e14, 4.8e12, 4.5e11),
    "H100 PCIe": GpuSpeed(7.56e14, 2e12, 6.4e10),
    "H100 NVL": GpuSpeed(8.35e14, 3.9e12, 6.4e10),
    "H100": GpuSpeed(9.89e14, 3.35e12, 4.5e11),
    "H800": GpuSpeed(9.89e14, 3.35e12, 2e11),
    "H20": GpuSpeed(1.48e14, 4e12, 4.5e11),
    "A100 SXM4 40GB": GpuSpeed(3.12e14, 1.555e12, 3e11),
    "A100": GpuSpeed(3.12e14, 2.039e12, 3e11),
    "A800": GpuSpeed(3.12e14, 2.039e12, 2e11),
    "L40S": GpuSpeed(3.62e14, 8.64e11, 3.2e10),
    "L40": GpuSpeed(1.81e14, 8.64e11, 3.2e10),
    "L4": GpuSpeed(1.21e14, 3e11, 3.2e10),
    "A10G": GpuSpeed(7.0e13, 6e11, 3.2e10),
    "A10": GpuSpeed(1.25e14, 6e11, 3.2e10),
    "RTX 5090": GpuSpeed(2.09e14, 1.792e12, 6.4e10),
    "RTX 4090": GpuSpeed(1.65e14, 1.008e12, 3.2e10),
    "RTX 3090": GpuSpeed(7.1e13, 9.36e11, 3.2e10),
}
"""Speeds from NVIDIA's data sheets and architecture white papers (`GB200`: of one of its GPUs), by part of the device
name. The first match is used."""


def find_gpu_speed(device_name: str) -> GpuSpeed | None:
    """Return the speed of a GPU; None if the GPU is not in the table."""
    words = f" {device_name.replace('-', ' ').replace('NVIDIA', '')} "
    return next((speed for name, speed in GPU_SPEEDS.items() if f" {name} " in words), None)


def find_peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a GPU; None if the GPU is not in the table."""
    return speed.flops if (speed := find_gpu_speed(device_name)) else None


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
        matrices = {name: parameter for name, parameter in text_parameters if parameter.ndim >= 2}
        if experts is None and any(EXPERTS in name for name in matrices):
            return None
        if not model.config.tie_word_embeddings:
            embedding = model.get_input_embeddings().weight  # a lookup, not a product
            matrices = {name: parameter for name, parameter in matrices.items() if parameter is not embedding}

        def count_active_parameters(name: str, parameter: torch.Tensor) -> int:
            count: int = parameter.numel()
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
        self.peak = find_peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
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
