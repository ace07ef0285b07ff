"""vLLM's engine with stubs instead of vLLM: outputs as a stream of new tokens (streaming clients) and as one complete
answer, LoRA adapters, the patch of the sampler on GPUs, and the end. tests/loop/test_engine*.py run it on CPUs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.lora import MaxLoRARanks
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from alphaapollo.engines.types import EngineError
from alphaapollo.engines.vllm.engine import VllmEngine
from alphaapollo.engines.vllm.patches import return_untruncated_logits
from alphaapollo.engines.vllm.settings import LORA_RANKS
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
        async def call(*arguments: Any, **named: Any) -> bool:
            self.calls.append((name, *arguments, *named.values()))
            return True

        return call


def calls_with_adapter(*methods: str) -> list[tuple[Any, ...]]:
    recorder = Recorder()
    engine = make_engine(recorder, transport="adapter", lora_rank=8)

    async def all_of_them() -> None:
        engine._core_death = asyncio.get_running_loop().create_future()
        for number, method in enumerate(methods, start=1):
            arguments = [f"/shm/v{number}"] if method == "receive_weights" else []
            await getattr(engine, method)(*arguments)

    asyncio.run(all_of_them())
    return recorder.calls


def test_base_weights_of_an_adapter_are_kept_in_host_memory_while_asleep() -> None:
    assert calls_with_adapter("sleep") == [("sleep", 1, "keep")]


def test_new_adapter_replaces_the_last_one() -> None:
    calls = calls_with_adapter("receive_weights", "receive_weights")
    assert [call[0] for call in calls] == ["add_lora", "remove_lora", "add_lora"]
    first, (_, removed), second = calls[0][1], calls[1], calls[2][1]
    assert (first.lora_int_id, first.lora_path) == (1, "/shm/v1") and removed == 1
    assert (second.lora_int_id, second.lora_path) == (2, "/shm/v2") and second.lora_name != first.lora_name


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
    patched = return_untruncated_logits(sample_random)
    assert torch.equal(patched(None, logits.clone(), None, None, None, torch.tensor([1]), None, *flags)[1], logits)
    assert patched(None, logits.clone(), None, None, None, None, None, *flags)[1][0, 1] == -torch.inf


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
