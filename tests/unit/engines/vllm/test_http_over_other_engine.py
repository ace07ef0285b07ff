"""vLLM's HTTP API over an engine that is not vLLM's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import MODEL_NAME, HttpAnswer, HttpApiSettings, HttpSampling
from alphaapollo.engines.vllm.http_over_other_engine import OtherEngine
from alphaapollo.engines.vllm.middleware import drop_empty_tools
from alphaapollo.types import Completion, Sampling, StopReason
from tests.unit.engines.specs import make_spec
from tests.unit.rollout.agents.agents_kit import write_model


class Api:
    """HTTP API over an engine that answers with the text "ab#c" at most, and records the requests."""

    def __init__(self, folder: Path):
        own = {"model_path": str(folder), "chat_tokenizer": str(folder), "log_path": str(folder / "log")}
        spec = make_spec(name="hf", max_model_len=512, **own)
        self.requests: list[HttpSampling] = []
        self.front_end = OtherEngine(spec, self.answer)
        self.app = self.front_end.build_http_app(HttpApiSettings())

    async def answer(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        self.requests.append(request)
        tokenizer = self.front_end.renderer.tokenizer
        stop = "#" if "#" in request.sampling.stop else ""
        ids = tokenizer.encode("ab#" if stop else "ab#c", add_special_tokens=False)
        ids = ids if stop else [*ids, tokenizer.eos_token_id]
        logprobs = [{token: -1.0, **dict.fromkeys(range(request.num_top), -2.0)} for token in ids]
        done = Completion(ids, [-1.0] * len(ids), StopReason.STOP, 3, 1, ((2, 1),))
        return HttpAnswer(done, stop, logprobs, [{token: -0.5} for token in token_ids[1:]])

    def post(self, path: str, **fields: object) -> dict:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post(path, json={"model": MODEL_NAME, **fields})

        found = asyncio.run(send())
        return {"status": found.status_code, **found.json()}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    before = dict(os.environ)
    yield Api(write_model(tmp_path_factory.mktemp("model")))
    os.environ.clear()
    os.environ.update(before)


CHAT = [{"role": "user", "content": "1"}]


def test_answers_of_a_chat(api: Api) -> None:
    api.requests.clear()
    found = api.post("/v1/chat/completions", messages=CHAT, n=2, seed=5, max_tokens=9, temperature=0.5, min_p=0.1)
    assert [choice["message"]["content"] for choice in found["choices"]] == ["ab#c"] * 2
    assert [request.sampling.seed for request in api.requests] == [5, 6]
    sampling = api.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.5)
    assert api.front_end.renderer.tokenizer.eos_token_id in sampling.stop_token_ids
    assert api.requests[0].penalties["min_p"] == 0.1


def test_stop_strings_and_log_probs(api: Api) -> None:
    found = api.post("/v1/chat/completions", messages=CHAT, stop=["#"], logprobs=True, top_logprobs=2)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "ab" and choice["stop_reason"] == "#"
    first, *_ = choice["logprobs"]["content"]
    assert first["token"] == "a" and first["logprob"] == -1.0 and api.requests[-1].num_top == 2


def test_log_probs_of_a_prompt(api: Api) -> None:
    """As lm-eval requests them."""
    found = api.post("/v1/completions", prompt=[5, 6, 7], max_tokens=1, logprobs=1, echo=True)
    assert api.requests[-1].scores_prompt
    assert found["choices"][0]["logprobs"]["token_logprobs"][:3] == [None, -0.5, -0.5]


def test_an_empty_list_of_tools_needs_no_parser(api: Api) -> None:
    """As inspect-ai requests Anthropic's API, of agents and of `alphaapollo serve`."""
    found = api.post("/v1/messages", messages=CHAT, max_tokens=9, tools=[])
    assert found["status"] == 200 and found["content"][0]["text"] == "ab#c", found
    app = FastAPI()
    app.middleware("http")(drop_empty_tools)

    @app.post("/v1/messages")
    async def read(request: Request) -> dict[str, Any]:
        return await request.json()

    client = TestClient(app)
    for tools in ([], [{"name": "add"}]):
        assert client.post("/v1/messages", json={"tools": tools}).json() == ({"tools": tools} if tools else {})


def test_settings_of_vllm_alone_are_refused(api: Api) -> None:
    found = api.post("/v1/chat/completions", messages=CHAT, logit_bias={"5": 1.0})
    assert found["status"] == 400 and "logit_bias" in found["error"]["message"]


def test_an_engine_with_generate_alone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallEngine(Engine):
        async def generate(self, token_ids: list[int], sampling: Sampling, *_: Any) -> Completion:
            http = await api.answer(token_ids, HttpSampling(sampling), "")
            return http.completion

    monkeypatch.setattr(api.front_end, "_answer", SmallEngine(make_spec()).answer_http)
    (choice,) = api.post("/v1/chat/completions", messages=CHAT, logprobs=True)["choices"]
    assert choice["message"]["content"] == "ab#c" and choice["logprobs"]["content"][0]["logprob"] == -1.0
    (choice,) = api.post("/v1/chat/completions", messages=CHAT, stop=["#"])["choices"]
    assert choice["message"]["content"] == "ab" and choice["stop_reason"] == "#"
    for name, setting in (("top_logprobs", {"logprobs": True, "top_logprobs": 2}), ("min_p", {"min_p": 0.1})):
        found = api.post("/v1/chat/completions", messages=CHAT, **setting)
        assert found["status"] == 400 and name in found["error"]["message"]
    found = api.post("/v1/completions", prompt=[5, 6, 7], max_tokens=1, logprobs=0, echo=True)
    assert found["status"] == 400 and "prompt_logprobs" in found["error"]["message"]
