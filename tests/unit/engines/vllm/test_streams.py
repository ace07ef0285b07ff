"""Outputs of vLLM's requests, as a stream of new tokens (streaming clients) and as one complete answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from alphaapollo.engines.protocol import EngineError
from alphaapollo.engines.vllm.engine import VllmEngine

PROMPT, ANSWER = [1, 2, 3], [4, 5, 6, 7]


def run(kind: RequestOutputKind, num_experts: int) -> int:
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

    async def play() -> int:
        spec: Any = SimpleNamespace(name="engine 0", rollout=SimpleNamespace(router_replay=True))
        engine: Any = VllmEngine(spec)
        engine._engine = SimpleNamespace(generate=generate)
        params = SamplingParams(output_kind=kind, n=2)
        return len([output async for output in engine._stream_outputs(PROMPT, params, "id")])

    return asyncio.run(play())


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_routed_experts_belong_to_the_complete_answer(kind: RequestOutputKind):
    assert run(kind, len(PROMPT) + len(ANSWER) - 1) == (8 if kind == RequestOutputKind.DELTA else 2)
    with pytest.raises(EngineError, match="5 of 6 tokens"):
        run(kind, 5)
