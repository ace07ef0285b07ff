from __future__ import annotations

from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.config.schema.planned_device import find_gpu
from alphaapollo.models.flops import FlopsEstimator
from tests.unit.tiny import VOCABULARY, build_model
from tests.vision.models import make


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Some other device", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert getattr(find_gpu(name), "tflops", None) == (peak and peak / 1e12)


class Tiny(torch.nn.Module):
    """An embedding of 10 x 4, a matrix of 4 x 6, a norm of 4, a head of 4 x 10."""

    def __init__(self, tied: bool, **more: Any) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(10, 4), torch.nn.LayerNorm(4)
        self.layer = torch.nn.Linear(4, 6, False)
        self.head = torch.nn.Linear(4, 10, False)
        if tied:
            self.head.weight = self.embedding.weight
        text = SimpleNamespace(num_attention_heads=2, hidden_size=4, num_hidden_layers=3, **more)
        self.config = SimpleNamespace(get_text_config=lambda: text, tie_word_embeddings=tied)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding


def test_the_head_counts_but_not_the_embedding() -> None:
    for tied in (False, True):
        assert FlopsEstimator.from_model(Tiny(tied=tied)) == FlopsEstimator(24 + 40, 24 + 40, 3, 4)
    assert FlopsEstimator.from_model(Tiny(tied=True, head_dim=8)) == FlopsEstimator(64, 64, 3, 16)


def test_only_active_experts_count() -> None:
    """Two layers of attention 32 x 32 x (1 + .5 + .5 + 1), router 4 x 32, two of four experts 3 x 24 x 32; a head."""
    layer = 32 * 32 * 3 + 4 * 32 + 2 * 3 * 24 * 32
    size = FlopsEstimator.from_model(build_model("qwen3_moe"))
    assert size is not None and size.num_parameters == size.num_trained == 2 * layer + VOCABULARY * 32
    model = build_model("qwen3_moe")
    model.config = build_model("qwen3").config  # which does not mention experts
    assert FlopsEstimator.from_model(model) is None


def test_frozen_parameters_have_no_weight_gradient() -> None:
    """24 of 64 parameters are trained: 4 x 64 + 2 x 24 per token."""
    tiny = Tiny(tied=True)
    tiny.embedding.requires_grad_(False)
    size = FlopsEstimator.from_model(tiny)
    assert size == FlopsEstimator(64, 24, 3, 4)
    assert size.estimate_training_flops(np.array([3, 5])) == (4 * 64 + 2 * 24) * 8 + 6 * 3 * 4 * 34


def test_a_vision_tower_does_not_count() -> None:
    """Two layers of q, k, v and output projection 64 x (128 + 64 + 64 + 128), MLP 3 x 64 x 128; tied head 64 x V."""
    from alphaapollo.config.schema import Model
    from alphaapollo.models.load import load_without_weights

    with TemporaryDirectory() as folder:
        make("qwen3_vl", folder)
        model = load_without_weights(Model(path=folder))
    vocabulary = model.config.get_text_config().vocab_size
    size = FlopsEstimator.from_model(model)
    assert size is not None and size.num_parameters == 2 * (64 * 384 + 3 * 64 * 128) + 64 * vocabulary
