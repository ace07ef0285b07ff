"""Fake vLLM engine: renders and parses requests like vLLM, but gives one canned answer. It needs no model weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Model
from alphaapollo.engines.http_api import HttpApiSettings
from alphaapollo.types import ImageInput

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

ANSWER = "OK"


class RecordedEngine:
    """Engine with vLLM's HTTP API. `answer` returns the text of an answer to a prompt.

    Raises ValueError if vLLM cannot serve the model.
    """

    errored = False

    def __init__(self, model: Model, max_model_len: int, answer: Callable[[str], str] = lambda prompt: ANSWER):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers.registry import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        try:
            self.vllm_config = AsyncEngineArgs(
                model=model.path,
                tokenizer=model.tokenizer_path or model.path,
                trust_remote_code=model.trust_remote_code,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_model_len,
                generation_config="vllm",
                enforce_eager=True,
                limit_mm_per_prompt={"video": 0},
            ).create_engine_config()
        except (ValueError, OSError) as error:
            raise ValueError(f"vLLM cannot serve {model.path}: {error}") from error
        self._answer = answer
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)

    def build_http_app(self, settings: HttpApiSettings) -> Any:
        """Return an ASGI application with vLLM's HTTP API."""
        from alphaapollo.engines.vllm.http_api import build_http_app

        return build_http_app(self, self._stream_outputs, settings)

    async def _stream_outputs(
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
