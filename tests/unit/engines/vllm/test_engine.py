"""vLLM's engine with stubs instead of vLLM: outputs as a stream of new tokens (streaming clients) and as one complete
answer, LoRA adapters, the patch of the sampler on GPUs, and the end. tests/loop/test_engine*.py run it on CPUs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.lora import MaxLoRARanks
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from alphaapollo.engines.types import EngineError, HttpSampling
from alphaapollo.engines.vllm.engine import VllmEngine
from alphaapollo.engines.vllm.patches import return_untruncated_logits
from alphaapollo.engines.vllm.settings import (
    LORA_RANKS,
    build_completion,
    build_http_answer,
    make_lora_request,
)
from alphaapollo.types import BASE_MODEL, Adapter, Sampling
from tests.unit.engines.specs import make_spec

PROMPT, ANSWER = [1, 2, 3], [4, 5, 6, 7]


def make_engine(stub: Any, **settings: Any) -> Any:
    engine: Any = VllmEngine(make_spec("cuda", **settings))
    engine._engine = stub
    return engine


def stream(kind: RequestOutputKind, num_experts: int) -> int:
    """Stream two answers, whose last outputs have the routed experts of `num_experts` tokens. Returns the number of
    outputs."""
    is_delta = kind == RequestOutputKind.DELTA

    async def generate(*_: Any, **__: Any) -> Any:
        for count in range(1, len(ANSWER) + 1) if is_delta else [len(ANSWER)]:
            for index in range(2):
                tokens = ANSWER[count - 1 : count] if is_delta else ANSWER
                is_last = count == len(ANSWER)
                experts = np.zeros((num_experts, 2, 1), np.uint8) if is_last else None
                answer = CompletionOutput(index, "", tokens, 0.0, None, routed_experts=experts)
                answer.finish_reason = "stop" if is_last else None
                yield RequestOutput("id", None, PROMPT, None, [answer], finished=is_last and index == 1)

    async def count() -> int:
        engine = make_engine(SimpleNamespace(generate=generate), router_replay=True)
        params = SamplingParams(output_kind=kind, n=2)
        return len([output async for output in engine._stream_outputs(PROMPT, params, "id")])

    return asyncio.run(count())


@pytest.mark.parametrize(("kind", "outputs"), [(RequestOutputKind.DELTA, 8), (RequestOutputKind.FINAL_ONLY, 2)])
def test_routed_experts_belong_to_the_complete_answer(kind: RequestOutputKind, outputs: int) -> None:
    assert stream(kind, len(PROMPT) + len(ANSWER) - 1) == outputs
    with pytest.raises(EngineError, match="5 of 6 tokens"):
        stream(kind, 5)


class Recorder:
    """Records the calls of all methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_num_unfinished_requests(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            return [7] if name == "collective_rpc" else True

        return call


def test_requests_use_the_newest_adapter_or_the_one_that_they_name() -> None:
    """The workers keep older adapters, also those that load_adapter loads. A version and an owner are parts of the
    prompt's salt."""
    found: list[tuple[str, str | None]] = []

    async def generate(prompt: Any, params: Any, request_id: str, lora_request: Any) -> Any:
        found.append((prompt["cache_salt"], lora_request and lora_request.lora_path))
        answer = CompletionOutput(0, "", ANSWER, 0.0, None, finish_reason="length")
        answer.logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in ANSWER]  # type: ignore[assignment]
        answer.weight_versions = [SimpleNamespace(version="9", start=0, end=4)]  # type: ignore[list-item]
        yield RequestOutput("id", None, PROMPT, None, [answer], finished=True, lora_request=lora_request)

    async def run() -> list[int]:
        recorder = Recorder()
        engine = make_engine(recorder, transport="adapter", lora_rank=8, colocate=False)
        engine._core_death = asyncio.get_running_loop().create_future()
        for version in (1, 2):
            await engine.receive_weights(f"/shm/v{version}", version)
        assert (await engine.confirm_weights(2)).digest == f"{7:016x}"
        assert await engine.load_adapter(Adapter("/other", 3)) == f"{7:016x}"
        loaded = [call[2] for call in recorder.calls if call[1] == "alphaapollo_load_adapter"]
        assert loaded == [("/shm/v1", 1), ("/shm/v2", 2), ("/other", 3)]
        recorder.generate = generate  # type: ignore[attr-defined]
        sampling = [Sampling(4, adapter=one) for one in (None, Adapter("/other", 3), BASE_MODEL)]
        sampling.append(replace(sampling[2], cache_owner="a"))
        answers = [await engine.generate(PROMPT, one, "id") for one in sampling]
        await engine.answer_http(PROMPT, HttpSampling(sampling[1]), "id")
        return [one.weight_version for one in answers]

    assert asyncio.run(run()) == [2, 3, 9, 9]
    assert found == [("2.2 ", "/shm/v2"), ("3.3 ", "/other"), ("0.0 ", None), ("0.0 a", None), ("3.3 ", "/other")]


def test_errors_of_vllm_about_a_request_are_value_errors() -> None:
    """SamplingParams raises the first, AsyncLLM.generate the second."""
    recorder = Recorder()
    engine = make_engine(recorder)

    async def generate(*_: Any, **__: Any) -> Any:
        raise VLLMValidationError("Token id 999 is out of vocabulary")
        yield

    recorder.generate = generate  # type: ignore[attr-defined]
    for temperature, word in ((3.0, "temperature"), (1.0, "999")):
        with pytest.raises(ValueError, match=word):
            asyncio.run(engine.answer_http(PROMPT, HttpSampling(Sampling(4, temperature)), "id"))


def make_output(adapter: Adapter, **fields: Any) -> RequestOutput:
    """Output of a request whose 4 tokens were sampled while the engine's version changed from 8 to 9."""
    answer = CompletionOutput(0, "", ANSWER, 0.0, None, finish_reason="stop")
    one, two = SimpleNamespace(logprob=-1.0), SimpleNamespace(logprob=-2.0)
    spans = [SimpleNamespace(version=str(8 + number), start=2 * number, end=2 * number + 2) for number in range(2)]
    own = {"logprobs": [{token: one, 0: two} for token in ANSWER], "weight_versions": spans}
    vars(answer).update(own | {"stop_reason": fields.pop("stop_reason", None)})
    lora = make_lora_request(adapter)
    return RequestOutput("id", None, PROMPT, None, [answer], finished=True, lora_request=lora, **fields)


def test_a_completion_has_the_version_of_its_adapter() -> None:
    assert make_lora_request(BASE_MODEL) is None
    with_base = build_completion((output := make_output(BASE_MODEL)).outputs[0], output)
    assert with_base.weight_versions == [(8, 2), (9, 2)] and with_base.num_cached_tokens == 0
    output = make_output(Adapter("/folder", 5), num_cached_tokens=2)
    with_adapter = build_completion(output.outputs[0], output)
    assert with_adapter.weight_versions == [(5, 4)] and with_adapter.num_cached_tokens == 2


def test_an_http_answer_has_all_log_probs_and_the_stop_string() -> None:
    assert build_http_answer(make_output(BASE_MODEL)).prompt_logprobs == []
    scored = [None, *({token: SimpleNamespace(logprob=-0.5)} for token in PROMPT[1:])]
    output = make_output(Adapter("/folder", 5))
    output.prompt_logprobs = scored  # type: ignore[assignment]
    answer = build_http_answer(output)
    assert answer.logprobs == [{token: -1.0, 0: -2.0} for token in ANSWER]
    assert answer.completion.logprobs == [-1.0] * 4 and answer.prompt_logprobs == [{2: -0.5}, {3: -0.5}]
    stops = [build_http_answer(make_output(BASE_MODEL, stop_reason=one)).stop_string for one in (None, 7, "END")]
    assert stops == ["", "", "END"]


def test_adapter_rank_is_rounded_up_to_one_vllm_supports() -> None:
    assert get_args(MaxLoRARanks) == LORA_RANKS
    assert LORA_RANKS[-1] == 512  # the largest rank that the schema accepts with an engine


@pytest.mark.parametrize("flags", [(False,), (False, False)], ids=["0.32", "0.33"])
def test_logits_are_taken_before_truncation(flags: tuple[bool, ...]) -> None:
    def sample_random(self, logits, mapping, mapping_np, pos, top_k, top_p, *received):  # type: ignore[no-untyped-def]
        assert received == flags
        logits[:, 1:] = -torch.inf
        return logits.argmax(-1), logits

    logits = torch.tensor([[1.0, 0.0]])
    patched, sampler = return_untruncated_logits(sample_random), SimpleNamespace(return_sampling_mask=False)
    assert torch.equal(patched(sampler, logits.clone(), None, None, None, torch.tensor([1]), None, *flags)[1], logits)
    assert patched(sampler, logits.clone(), None, None, None, None, None, *flags)[1][0, 1] == -torch.inf
    sampler.return_sampling_mask = True  # with a mask, log-probs are those of the kept tokens
    assert patched(sampler, logits.clone(), None, None, None, torch.tensor([1]), None, *flags)[1][0, 1] == -torch.inf


def test_a_core_that_ends_just_before_it_is_killed_is_closed() -> None:
    freed = []

    class Resources:
        """What vLLM frees after its core has ended."""

        engine_manager = SimpleNamespace(processes=[])

        def __call__(self) -> None:
            freed.append(True)

    def shutdown() -> None:
        raise psutil.NoSuchProcess(1)

    engine = make_engine(SimpleNamespace(shutdown=shutdown, engine_core=SimpleNamespace(resources=Resources())))
    asyncio.run(engine.close())
    assert freed and engine.list_pids() == []
