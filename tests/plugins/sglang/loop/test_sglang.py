"""What only SGLang does: answers to clients with log-probs, and weights over its process group. The tests of all
engines run on SGLang, too (tests/loop/engine_kit.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from alphaapollo.engines.types import HttpSampling
from alphaapollo.engines.weight_sync import buckets, transfer
from alphaapollo.engines.weight_sync.transport import WeightUpdate
from alphaapollo.plugins.sglang.transfer import SglangTransferSender
from alphaapollo.types import Sampling
from tests.loop.engine_kit import Session, checkpoint, logprobs_of, make_model, mean_abs_difference, start_engine
from tests.loop.stack import Case, StackRunner
from tests.loop.test_agents import PROGRAM, TURNS, check_exact_tokens, write_agent
from tests.loop.weight_transfer import Client
from tests.plugins.sglang.environment import needs_sglang

pytestmark = needs_sglang
OLD, NEW = (make_model("Qwen3", seed, tie_word_embeddings=True) for seed in (0, 1))
PROMPT = list(range(7, 30))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with start_engine(OLD, tmp_path_factory.mktemp("engine"), name="sglang") as started:
        yield started


def test_answers_for_the_http_api_have_what_a_client_requests(session: Session) -> None:
    sampling, answer_http = Sampling(6, seed=1), session.engine.answer_http
    answer = session.run(answer_http(PROMPT, HttpSampling(sampling, num_top=2, scores_prompt=True), "http"))
    (expected,) = session.generate((PROMPT, sampling))
    assert [*answer.completion.token_ids] == expected.token_ids
    for token, logprob, position in zip(expected.token_ids, expected.logprobs, answer.logprobs, strict=True):
        assert position[token] == pytest.approx(logprob, abs=1e-5) and len(position) in (2, 3)
    prompt = [position[token] for token, position in zip(PROMPT[1:], answer.prompt_logprobs, strict=True)]
    assert mean_abs_difference(prompt, logprobs_of(OLD, PROMPT)) < 1e-5
    rewarded = HttpSampling(Sampling(24, temperature=0.0), {"frequency_penalty": -2.0})
    repeated = session.run(answer_http(PROMPT, rewarded, "http")).completion.token_ids
    (greedy,) = session.generate((PROMPT, rewarded.sampling))
    assert len({*repeated}) < len({*greedy.token_ids}) / 2
    with pytest.raises(ValueError, match="min_p"):
        session.run(answer_http(PROMPT, HttpSampling(sampling, {"min_p": 0.1}), "http"))


def test_broadcast_to_sglang(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets through a process group with the engine: gloo here, NCCL on GPUs."""
    monkeypatch.setattr(transfer, "prefetch_buckets", lambda buckets: buckets)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2**18)

    async def publish(sender: SglangTransferSender, model: Any, version: int) -> WeightUpdate:
        update = await asyncio.to_thread(sender.send, checkpoint(model).items(), version)
        assert update is not None
        receipt = await session.engine.confirm_weights(version)
        assert (receipt.version, receipt.digest) == (update.version, update.digest)
        return update

    async def publish_both() -> None:
        client = Client(session.engine, asyncio.get_running_loop())
        sender = SglangTransferSender(client, torch.float32, 0, "nccl", "127.0.0.1", num_engine_ranks=1)
        assert (await publish(sender, NEW, 11)).digest != (await publish(sender, OLD, 12)).digest
        assert client.num_buckets > 4

    session.run(publish_both())
    assert session.gap(OLD) < 1e-5 < session.gap(NEW)


@pytest.mark.nightly
def test_exact_tokens_of_sglang(stack: StackRunner) -> None:
    case = Case(check_exact_tokens, (*TURNS, "actor_rollout_ref.rollout.name=sglang"), partial(write_agent, PROGRAM))
    case.run(stack)
