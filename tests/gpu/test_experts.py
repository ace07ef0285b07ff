"""vLLM returns the experts that the trainer's model would choose, over turns with a shared prefix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.config.schema import Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.engines.types import EngineSpec
from alphaapollo.engines.vllm.engine import VllmEngine
from alphaapollo.models.moe_routing import RouterHooks
from alphaapollo.rollout.token_context import build_append_context_rows
from alphaapollo.types import Row, Sampling, Turn
from tests.loop.engine_kit import PROBE, make_model

pytest.importorskip("vllm")


async def three_turns(model: Any, folder: Path, device: Device, dtype: str) -> Row:
    """Keys, values and experts of earlier turns come from the engine's cache."""
    model.save_pretrained(folder / "model")
    spec = EngineSpec(
        index=0,
        model_path=str(folder / "model"),
        trust_remote_code=False,
        rollout=Rollout(
            router_replay=True, gpu_memory_utilization=0.2, kv_cache_gib=0.1, enforce_eager=device == "cpu"
        ),
        device=device,
        dtype=dtype,
        max_model_len=256,
        log_path=str(folder / "engine.log"),
        transport="ipc" if device == "cuda" else "shared_memory",
    )
    engine, turns, seen = VllmEngine(spec), [], list[int]()
    await engine.start()
    for number, context in enumerate(([*PROBE, *PROBE], [7, 8, 9], [9, 8, 7])):
        seen += context
        completion = await engine.generate(seen, Sampling(20, seed=number), f"turn {number}")
        assert (completion.num_cached_tokens > 0) is (number > 0)
        turns.append(Turn(context, completion, ""))
        seen += completion.token_ids
    await engine.close()
    (row,) = build_append_context_rows(turns)
    assert row.token_ids == seen and len(row.columns["routed_experts"]) == len(seen)
    return row


def share_of_others(model: Any, row: Row, device: Device) -> float:
    """Share of the engine's expert choices that transformers would not make. The last token was never computed."""
    routers = RouterHooks.wrap_routers(model)
    assert routers is not None
    experts = torch.from_numpy(row.columns["routed_experts"][:-1]).to(device)
    now = routers.start_recording(
        torch.ones(len(experts), dtype=torch.bool, device=device), {"routed_experts": experts}
    )
    with torch.inference_mode():
        model(torch.tensor([row.token_ids[:-1]], device=device))
    return float(now.num_overridden / now.counts.sum())


def experts_returned(folder: Path, device: Device, dtype: str) -> float:
    model = make_model("Qwen3Moe", 0, tie_word_embeddings=True, head_dim=64, num_experts=16).eval()
    row = asyncio.run(three_turns(model, folder, device, dtype))
    return share_of_others(model.to(device, getattr(torch, dtype)), row, device)


def test_they_are_those_of_the_model(tmp_path: Path) -> None:
    assert experts_returned(tmp_path, "cuda", "bfloat16") < 0.1  # random choices: 0.9
