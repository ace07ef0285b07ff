"""Completions of a model in training equal those of transformers with its exported weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame

from alphaapollo.types import Completion, Sampling, SamplingRequest, StopReason
from tests.unit.workers.layouts import run_on_ranks
from tests.unit.workers.test_sft_worker import SFT
from tests.unit.workers.training import Case, load_plain, make_batch, make_worker

PROMPTS = [[5, 9, 2], [7], [30, 31, 32, 33, 34, 35], [11, 4], [40, 12, 13]]
GREEDY = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(1,))
DRAWN = [Sampling(max_tokens=3 + index, top_k=20, seed=index, stop_token_ids=(1,)) for index in range(len(PROMPTS))]


def trained_answers(
    rank: int, num_ranks: int, address: str, case: Case, export: str
) -> tuple[list[Completion], list[Completion], list[Completion], bool]:
    """Greedy and sampled completions of this rank's prompts after a step, those of a prompt that only rank 0 has, and
    whether another step works."""
    worker = make_worker(case, rank, num_ranks, address)
    own, shares = case.share(rank, num_ranks)
    worker.step(make_batch(case, shares).rank_batches[own])
    mine = range(rank, len(PROMPTS), num_ranks)
    greedy = worker.generate([SamplingRequest(PROMPTS[index], GREEDY) for index in mine], version=7)
    drawn = worker.generate([SamplingRequest(PROMPTS[index], DRAWN[index]) for index in mine], version=7)
    single = worker.generate([] if rank else [SamplingRequest(PROMPTS[0], GREEDY)], version=7)
    worker.export(export)
    again = worker.step(make_batch(replace(case, row_seed=3), shares).rank_batches[own])
    worker.close()
    return greedy, drawn, single, math.isfinite(again.metrics["grad_norm"])


@torch.inference_mode()
def sample_greedily(model: Any, token_ids: list[int], sampling: Sampling) -> list[int]:
    sampled: list[int] = []
    while len(sampled) < sampling.max_tokens and (not sampled or sampled[-1] not in sampling.stop_token_ids):
        logits = model(torch.tensor([token_ids + sampled])).logits[0, -1]
        sampled.append(int(logits.argmax()))
    return sampled


@pytest.mark.parametrize(
    ("name", "num_ranks", "fields"),
    [
        ("qwen3", 1, {"checkpointing": True}),
        ("gemma2", 1, {}),
        ("qwen3_moe", 2, {}),
        ("llama", 2, {"lora_rank": 4, "attention": "sdpa"}),
        ("qwen3", 2, {"sequence_parallel": 2, "attention": "sdpa"}),
    ],
)
def test_completions_equal_those_of_the_exported_model(
    locate, tmp_path: Path, name: str, num_ranks: int, fields: dict[str, Any]
) -> None:
    case = locate(replace(SFT, folder=name, settings={"optim": {"lr": 0.05}, "grad_clip": 0.5}, **fields))
    parts = run_on_ranks(trained_answers, num_ranks, case, str(tmp_path / "model"))
    exported = load_plain(tmp_path / "model")
    for rank, (greedy, drawn, single, goes_on) in enumerate(parts):
        assert goes_on and [one.token_ids for one in single] == ([] if rank else [greedy[0].token_ids])
        for place, index in enumerate(range(rank, len(PROMPTS), num_ranks)):
            assert list(greedy[place].token_ids) == sample_greedily(exported, PROMPTS[index], GREEDY)
            assert greedy[place].weight_version == 7
            one = drawn[place]
            ended = one.token_ids[-1] == 1
            assert one.stop_reason is (StopReason.STOP if ended else StopReason.LENGTH)
            assert ended or len(one.token_ids) == DRAWN[index].max_tokens
            assert len(one.logprobs) == len(one.token_ids) and max(one.logprobs) < 0.0


def test_generation_does_not_compile(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers, which record torch's stance instead, run as they are."""
    stances: list[str] = []

    def record_stance(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: (stances.append(eval_frame._stance.stance), forward(*args, **kwargs))[1]

    monkeypatch.setattr(torch, "compile", record_stance)
    worker, _ = start(SFT, folder="llama", compiles=True)
    stances.clear()
    worker.evaluate(worker.batch)
    assert {*stances} == {"default"}
    stances.clear()
    worker.generate([SamplingRequest(PROMPTS[0], DRAWN[0])], version=0)
    assert {*stances} == {"force_eager"}
