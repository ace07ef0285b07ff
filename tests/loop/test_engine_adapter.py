"""LoRA adapters that an engine serves on top of its loaded weights: loaded, used, replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.config.schema import Lora
from alphaapollo.models.lora import add_adapters, gather_scaled_adapter, get_lora_layers
from alphaapollo.types import Sampling
from tests.loop.engine_kit import PROBE, logprobs_of, make_model, mean_abs_difference, needs_sglang, start_engine

pytest.importorskip("peft")


async def gather(calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls))


def draw(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in get_lora_layers(model).values():
        for part in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            part.data = torch.randn(part.shape, generator=generator) * 0.1


@pytest.mark.parametrize(
    ("kind", "targets", "rank", "name"),
    [
        ("Qwen3", "all-linear", 4, "vllm"),
        ("Llama", ["q_proj", "v_proj", "down_proj"], 12, "vllm"),
        pytest.param("Llama", ["q_proj", "v_proj", "down_proj"], 12, "sglang", marks=needs_sglang),
    ],
)
def test_adapters_are_loaded_and_used(kind: str, targets: Any, rank: int, tmp_path: Path, name: str) -> None:
    """Engines fuse q, k and v, also if k has no adapter; vLLM pads rank 12 to 16; the scale is 16 / rank."""
    with start_engine(make_model(kind, 0, tie_word_embeddings=True), tmp_path, lora_rank=rank, name=name) as session:
        model = make_model(kind, 0, tie_word_embeddings=True).eval()
        add_adapters(model, Lora(lora_rank=rank, target_modules=targets), seed=0)
        assert session.gap(model) < 1e-5  # B is 0
        before = session.run(session.engine.log_probs(PROBE))
        for version in (1, 2):
            draw(model, version)
            with session.send_adapter(dict(gather_scaled_adapter(model)), version) as update:
                session.publish_verified(update)
            assert session.gap(model) < 1e-5
            assert mean_abs_difference(session.run(session.engine.log_probs(PROBE)), before) > 0.05
        texts = [list(range(5 + start, 45 + start)) for start in range(4)]
        scored = session.run(gather(session.engine.log_probs(text) for text in texts))
        for text, logprobs in zip(texts, scored, strict=True):
            assert logprobs == pytest.approx(logprobs_of(model, text), abs=1e-4)
        (answer,) = session.generate((PROBE, Sampling(4, temperature=1.0)))
        assert answer.weight_version == 2
        expected = logprobs_of(model, [*PROBE, *answer.token_ids])[-4:]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
