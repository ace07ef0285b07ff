"""Measure the log-prob mismatch of a bfloat16 engine and the trainer on a mixture of experts, with and without router
replay (docs/parallelism.md).

    .venv/bin/python scripts/bench/router_replay.py

A Qwen3-MoE with random weights of large variance samples in vLLM; the trainer scores the same tokens. The last line is
a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from alphaapollo.algorithms.mismatch import mismatch_metrics, sum_mismatch  # noqa: E402
from alphaapollo.batching.batch import Rows  # noqa: E402
from alphaapollo.config.schema import Model, Rollout  # noqa: E402
from alphaapollo.engines.protocol import EngineSpec  # noqa: E402
from alphaapollo.engines.vllm.engine import VllmEngine  # noqa: E402
from alphaapollo.models.load import load_causal_lm  # noqa: E402
from alphaapollo.models.micro_batch import MicroBatchBuilder  # noqa: E402
from alphaapollo.models.policy import PolicyModel  # noqa: E402
from alphaapollo.rollout.context import build_append_context_rows  # noqa: E402
from alphaapollo.types import Row, Sampling, Turn  # noqa: E402
from scripts.bench._task import machine  # noqa: E402

CONFIG = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 32,
          "num_experts_per_tok": 4, "moe_intermediate_size": 64, "max_position_embeddings": 512,
          "initializer_range": 0.08, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}  # fmt: skip


def save_model(folder: str) -> None:
    """Save in bfloat16, so that engine and trainer have the same weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(folder)


async def sample(folder: str, count: int, length: int) -> list[Row]:
    """Sample `count` responses of `length` tokens to prompts of 16 tokens."""
    spec = EngineSpec(
        index=0,
        model_path=folder,
        trust_remote_code=False,
        rollout=Rollout(router_replay=True, max_num_seqs=256, enforce_eager=True, kv_cache_gib=0.2),
        device="cpu",
        dtype="bfloat16",
        max_model_len=16 + length,
        log_path=f"{folder}/engine.log",
    )
    engine = VllmEngine(spec)
    await engine.start()
    prompts = [[(7 * i + 5 * j) % 500 + 2 for j in range(16)] for i in range(count)]
    calls = (engine.generate(ids, Sampling(length, seed=i), f"r{i}") for i, ids in enumerate(prompts))
    completions = await asyncio.gather(*calls)
    await engine.close()
    turns = [Turn(ids, completion, "") for ids, completion in zip(prompts, completions, strict=True)]
    return [build_append_context_rows([turn])[0] for turn in turns]


@torch.no_grad()
def gap(policy: PolicyModel, rows: Rows) -> dict[str, float]:
    """Mismatch metrics of trainer and engine, and the share of engine experts that the trainer would not choose."""
    columns, differs, chosen = [], 0.0, 0.0
    for row in range(len(rows)):
        columns.append(policy(MicroBatchBuilder(True, torch.device("cpu")).build(rows, [row]), 1.0).logprobs.numpy())
        assert policy.routers is not None and policy.routers.current is not None
        differs += float(policy.routers.current.num_overridden)
        chosen += float(policy.routers.current.counts.sum())
    ids = np.repeat(np.arange(len(rows)), rows.response_lengths)
    positions = np.concatenate([np.arange(len(column)) for column in columns])
    figures = mismatch_metrics([sum_mismatch(np.concatenate(columns), rows.rollout_logprobs, ids, positions)])
    names = ("k3", "abs", "rho_p01", "rho_p99", "ess", "ess_sequence")
    found = {name: round(figures[f"mismatch/{name}"], 6) for name in names}
    return found | ({"router_differs": round(differs / chosen, 4)} if "routed_experts" in rows.columns else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        rows = Rows.from_rows(asyncio.run(sample(folder, asked.count, asked.length)))
        own = Rows(rows.token_ids, rows.lengths, rows.response_starts, rows.action_mask, rows.rollout_logprobs)
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            policy = PolicyModel(load_causal_lm(Model(path=folder), "padded")).to(dtype)
            for name, each in (("own", own), ("replayed", rows)):
                found[f"{str(dtype).removeprefix('torch.')} trainer, {name}"] = gap(policy, each)
    for name, figures in found.items():
        print(f"{name:28}", *(f"{key} {value:.2g}" for key, value in figures.items()))
    print(json.dumps({"machine": machine(), "tokens": int(rows.action_mask.sum()), "gap": found}))


if __name__ == "__main__":
    main()
