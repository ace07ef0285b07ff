"""Fake vLLM engine: renders and parses requests like vLLM, but gives one canned answer. It needs no model weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Model
from alphaapollo.engines.vllm.http_over_other_engine import FrontEnd
from alphaapollo.types import ImageInput

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

ANSWER = "OK"


class RecordedEngine(FrontEnd):
    """Engine with vLLM's HTTP API. `answer` returns the text of an answer to a prompt.

    Raises ValueError if vLLM cannot serve the model.
    """

    def __init__(self, model: Model, max_model_len: int, answer: Callable[[str], str] = lambda prompt: ANSWER):
        super().__init__(model.path, model.tokenizer_path or model.path, model.trust_remote_code, max_model_len)
        self._answer = answer

    async def stream_outputs(
        self, token_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImageInput] = ()
    ) -> AsyncIterator[RequestOutput]:
        from vllm.logprobs import FlatLogprobs, Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

        tokenizer: Any = self.renderer.tokenizer
        text = self._answer(tokenizer.decode(token_ids))
        all_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        answer = all_ids[: params.max_tokens]
        logprobs: Any = FlatLogprobs() if params.flat_logprobs else []
        for token in answer:
            logprobs.append({token: Logprob(0.0, 1, tokenizer.decode([token]))})
        outputs = [
            CompletionOutput(
                index,
                tokenizer.decode(answer[: len(all_ids) - 1], skip_special_tokens=params.skip_special_tokens),
                answer,
                cumulative_logprob=0.0,
                logprobs=logprobs,
                finish_reason="stop" if answer == all_ids else "length",
                weight_versions=[WeightVersionSpan(start=0, end=len(answer), version="0")],
            )
            for index in range(params.n)
        ]
        yield RequestOutput(request_id, None, token_ids, None, outputs, finished=True)
