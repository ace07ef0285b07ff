"""Completions of a model in training equal those of transformers with its exported weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.models import load
from alphaapollo.types import Completion, Sampling, SamplingRequest, StopReason
from tests.unit.tiny import run_ranks, some_rows
from tests.unit.workers.test_sft_worker import SftCase, make_worker, rank_batch
from tests.unit.workers.training import load_plain

PROMPTS = [[5, 9, 2], [7], [30, 31, 32, 33, 34, 35], [11, 4], [40, 12, 13]]
GREEDY = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(1,))
DRAWN = [Sampling(max_tokens=3 + index, top_k=20, seed=index, stop_token_ids=(1,)) for index in range(len(PROMPTS))]


def trained_answers(
    rank: int, num_ranks: int, address: str, case: SftCase, export: str
) -> tuple[list[Completion], list[Completion], list[Completion], bool]:
    """Greedy and sampled completions of this rank's prompts after a step, those of a prompt that only rank 0 has, and
    whether another step works."""
    worker = make_worker(case, rank, num_ranks, address)
    worker.step(rank_batch(case, some_rows(6), rank, num_ranks))
    mine = range(rank, len(PROMPTS), num_ranks)
    greedy = worker.generate([SamplingRequest(PROMPTS[index], GREEDY) for index in mine], version=7)
    drawn = worker.generate([SamplingRequest(PROMPTS[index], DRAWN[index]) for index in mine], version=7)
    single = worker.generate([] if rank else [SamplingRequest(PROMPTS[0], GREEDY)], version=7)
    worker.export(export)
    again = worker.step(rank_batch(case, some_rows(6, seed=3), rank, num_ranks))
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
        ("qwen3", 1, {"model": {"enable_gradient_checkpointing": True}}),
        ("gemma2", 1, {}),
        ("qwen3_moe", 2, {}),
        ("llama", 2, {"model": {"lora_rank": 4}, "attention": "sdpa"}),
        ("qwen3", 2, {"sequence_parallel": 2, "attention": "sdpa"}),
    ],
)
def test_completions_equal_those_of_the_exported_model(
    model_folder, tmp_path: Path, name: str, num_ranks: int, fields: dict[str, Any]
) -> None:
    given = (SftCase(str(model_folder(name)), optim={"lr": 0.05}, **fields), str(tmp_path / "model"))
    parts = [trained_answers(0, 1, "", *given)] if num_ranks == 1 else run_ranks(trained_answers, num_ranks, *given)
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


def test_generation_does_not_compile(model_folder, close_later, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    monkeypatch.setattr(load, "COMPILER", lambda graph, inputs: graphs.append(graph) or graph.forward)
    case = SftCase(str(model_folder("llama")), model={"use_torch_compile": True})
    worker, batch = close_later(make_worker(case, 0, 1, "")), rank_batch(case, some_rows(4), 0, 1)
    worker.evaluate(batch)
    before = len(graphs)
    assert before and worker.generate([SamplingRequest(PROMPTS[0], DRAWN[0])], version=0)[0].token_ids
    assert len(graphs) == before
    worker.evaluate(batch)
