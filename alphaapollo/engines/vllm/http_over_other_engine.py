"""vLLM's HTTP API over an engine that is not vLLM's: vLLM renders chats, parses requests and answers, and the other
engine samples."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from alphaapollo.engines.process import log_library_to_file
from alphaapollo.engines.types import EngineSpec, HttpAnswer, HttpApiSettings, HttpSampling
from alphaapollo.engines.vllm.settings import MAX_LOGPROBS, VllmObject, build_vllm_environment
from alphaapollo.engines.weight_sync.vllm_import import import_vllm
from alphaapollo.types import ImageInput, Sampling, StopReason
from alphaapollo.utils.text import cut_at_stop

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams

NEUTRAL_PENALTIES = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
UNSUPPORTED = ("structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens")

AnswerFunction = Callable[[list[int], HttpSampling, str], Awaitable[HttpAnswer]]
"""Signature of Engine.answer_http."""


class FrontEnd:
    """Stand-in for vLLM's engine that loads no weights. Raises ValueError if vLLM cannot serve the model."""

    errored = False

    def __init__(self, model_path: str, tokenizer_path: str, trust_remote_code: bool, max_model_len: int):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers.registry import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config = AsyncEngineArgs(
            model=model_path,
            tokenizer=tokenizer_path,
            trust_remote_code=trust_remote_code,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_model_len,
            max_logprobs=MAX_LOGPROBS,
            generation_config="vllm",
            enforce_eager=True,
            limit_mm_per_prompt={"video": 0},
        ).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)

    def build_http_app(self, settings: HttpApiSettings) -> VllmObject:
        """Return an ASGI application with vLLM's HTTP API."""
        from alphaapollo.engines.vllm.http_api import build_http_app  # imports FastAPI

        return build_http_app(self, self.stream_outputs, settings)

    def stream_outputs(
        self, token_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImageInput] = ()
    ) -> AsyncIterator[RequestOutput]:
        """Run a request, and yield its output in vLLM's form."""
        raise NotImplementedError


class OtherEngine(FrontEnd):
    """Front end of an engine with `answer_http`. Streamed answers arrive in one piece."""

    def __init__(self, spec: EngineSpec, answer: AnswerFunction):
        os.environ.update(build_vllm_environment(spec))
        log_library_to_file("vllm", spec.log_path)
        import_vllm()
        super().__init__(spec.model_path, spec.chat_tokenizer, spec.trust_remote_code, spec.max_model_len)
        self._answer = answer

    async def stream_outputs(
        self, token_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImageInput] = ()
    ) -> AsyncIterator[RequestOutput]:
        from vllm.outputs import RequestOutput

        request = read_sampling_params(params)
        seeds = [request.sampling.seed + index for index in range(params.n)]
        seeded_requests = [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]
        answers = await asyncio.gather(*(self._answer(token_ids, seeded, request_id) for seeded in seeded_requests))
        prompt_logprobs: VllmObject = None
        if request.scores_prompt:
            prompt_logprobs = [None, *map(self._make_logprobs, answers[0].prompt_logprobs)]
        outputs = [self._build_output(index, answer, params) for index, answer in enumerate(answers)]
        cached = answers[0].completion.num_cached_tokens
        yield RequestOutput(
            request_id, None, token_ids, prompt_logprobs, outputs, finished=True, num_cached_tokens=cached
        )

    def _build_output(self, index: int, answer: HttpAnswer, params: SamplingParams) -> CompletionOutput:
        from vllm.logprobs import FlatLogprobs
        from vllm.outputs import CompletionOutput, WeightVersionSpan

        completion, ids = answer.completion, list(answer.completion.token_ids)
        text, stop = self._decode_answer(answer, ids, params)
        logprobs: VllmObject = FlatLogprobs() if params.flat_logprobs else []
        for position in answer.logprobs:
            logprobs.append(self._make_logprobs(position))
        spans, end = [], 0
        for version, count in completion.weight_versions:
            spans.append(WeightVersionSpan(start=end, end=end + count, version=str(version)))
            end += count
        return CompletionOutput(
            index,
            text,
            ids,
            cumulative_logprob=sum(completion.logprobs),
            logprobs=logprobs,
            finish_reason=str(completion.stop_reason),
            stop_reason=stop or None,
            weight_versions=spans,
        )

    def _decode_answer(self, answer: HttpAnswer, token_ids: list[int], params: SamplingParams) -> tuple[str, str]:
        """Return the text of an answer, and the stop string that ended it, or an empty text."""
        if (stop := answer.stop_string) is None:
            is_ended_by_token = token_ids[-1] in params.all_stop_token_ids
        else:
            is_ended_by_token = answer.completion.stop_reason is StopReason.STOP and not stop
        shown = token_ids[:-1] if is_ended_by_token else token_ids
        text: str = self.renderer.tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        if stop is None:
            candidates = () if is_ended_by_token else read_stop_strings(params)
            found = [string for string in candidates if string in text]
            stop = min(found, key=lambda string: text.index(string) + len(string), default="")  # the first to end
        return (cut_at_stop(text, [stop], params.include_stop_str_in_output) if stop else text), stop

    def _make_logprobs(self, position: dict[int, float]) -> dict[int, VllmObject]:
        from vllm.logprobs import Logprob

        decode = self.renderer.tokenizer.decode
        return {token: Logprob(logprob, None, decode([token])) for token, logprob in position.items()}


def read_sampling_params(params: SamplingParams) -> HttpSampling:
    """Convert vLLM's sampling settings. Raises ValueError for settings that only vLLM's engine supports."""
    unsupported = [name for name in UNSUPPORTED if getattr(params, name)]
    if unsupported:
        raise ValueError(f"{', '.join(unsupported)}: this engine does not support these settings. Remove them.")
    sampling = Sampling(
        max_tokens=params.max_tokens or 1,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=random.getrandbits(31) if params.seed is None else params.seed,
        stop_token_ids=tuple(params.all_stop_token_ids),
        stop=read_stop_strings(params),
        includes_stop=params.include_stop_str_in_output,
    )
    penalties = {name: getattr(params, name) for name in NEUTRAL_PENALTIES}
    num_top = max(params.logprobs or 0, params.prompt_logprobs or 0)
    return HttpSampling(
        sampling,
        {name: penalty for name, penalty in penalties.items() if penalty != NEUTRAL_PENALTIES[name]},
        num_top,
        params.prompt_logprobs is not None,
    )


def read_stop_strings(params: SamplingParams) -> tuple[str, ...]:
    return tuple([params.stop] if isinstance(params.stop, str) else params.stop or ())
