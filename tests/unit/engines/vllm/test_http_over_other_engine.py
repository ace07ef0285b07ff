"""vLLM's HTTP API over an engine that is not vLLM's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from alphaapollo.engines.protocol import MODEL_NAME, HttpApiSettings
from alphaapollo.engines.vllm.http_over_other_engine import OtherEngine
from alphaapollo.types import Completion, Sampling, StopReason
from tests.unit.engines.specs import make_spec
from tests.unit.rollout.agents.agents_kit import write_model


class Engine:
    """Remote engine that answers with the text "ab#c" at most, and records the requests."""

    def __init__(self, folder: Path):
        own = {"model_path": str(folder), "chat_tokenizer": str(folder), "log_path": str(folder / "log")}
        spec = make_spec(name="sglang", max_model_len=512, **own)
        self.requests: list[Sampling] = []
        self.front_end = OtherEngine(spec, self.generate)
        self.app = self.front_end.build_http_app(HttpApiSettings())

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        self.requests.append(sampling)
        tokenizer = self.front_end.renderer.tokenizer
        stop = "#" if "#" in sampling.stop else ""
        ids = tokenizer.encode("ab#" if stop else "ab#c", add_special_tokens=False)
        ids = ids if stop else [*ids, tokenizer.eos_token_id]
        return Completion(ids, [-1.0] * len(ids), StopReason.STOP, 3, 1, ((2, 1),))

    def post(self, path: str, **fields: object) -> dict:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post(path, json={"model": MODEL_NAME, **fields})

        found = asyncio.run(send())
        return {"status": found.status_code, **found.json()}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    before = dict(os.environ)
    yield Engine(write_model(tmp_path_factory.mktemp("model")))
    os.environ.clear()
    os.environ.update(before)


CHAT = [{"role": "user", "content": "1"}]
TOP: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}


def test_answers_of_a_chat(engine: Engine) -> None:
    engine.requests.clear()
    found = engine.post("/v1/chat/completions", messages=CHAT, n=2, seed=5, max_tokens=9, temperature=0.5)
    assert [choice["message"]["content"] for choice in found["choices"]] == ["ab#c"] * 2
    assert [sampling.seed for sampling in engine.requests] == [5, 6]
    sampling = engine.requests[0]
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.5)
    assert engine.front_end.renderer.tokenizer.eos_token_id in sampling.stop_token_ids


def test_stop_strings_and_log_probs(engine: Engine) -> None:
    found = engine.post("/v1/chat/completions", messages=CHAT, stop=["#"], logprobs=True)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "ab" and choice["stop_reason"] == "#"
    first, *_ = choice["logprobs"]["content"]
    assert first["token"] == "a" and first["logprob"] == -1.0


def test_an_empty_list_of_tools_needs_no_parser(engine: Engine) -> None:
    """As inspect-ai requests Anthropic's API of agents."""
    found = engine.post("/v1/messages", messages=CHAT, max_tokens=9, tools=[])
    assert found["status"] == 200 and found["content"][0]["text"] == "ab#c", found


def test_settings_of_vllm_alone_are_refused(engine: Engine) -> None:
    for name, setting in (("logit_bias", {"logit_bias": {"5": 1.0}}), ("top_logprobs", TOP), ("min_p", {"min_p": 0.1})):
        found = engine.post("/v1/chat/completions", messages=CHAT, **setting)
        assert found["status"] == 400 and name in found["error"]["message"]
