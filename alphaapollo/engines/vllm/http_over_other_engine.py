"""vLLM's HTTP API over an engine that is not vLLM's: vLLM renders chats, parses requests and answers, and the other
engine samples."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from alphaapollo.engines.process import log_library_to_file
from alphaapollo.engines.protocol import EngineSpec, HttpApiSettings
from alphaapollo.engines.vllm.settings import MAX_LOGPROBS, build_vllm_environment
from alphaapollo.types import Completion, ImageInput, Sampling
from alphaapollo.utils.text import cut_at_stop
from alphaapollo.weight_sync.vllm_import import import_vllm

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

UNSUPPORTED = (
    *("structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "prompt_logprobs"),
    *("min_p", "presence_penalty", "frequency_penalty"),
)


class FrontEnd:
    """What vLLM's HTTP API needs of an engine, without a model. Raises ValueError if vLLM cannot serve the model."""

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

    def build_http_app(self, settings: HttpApiSettings) -> Any:
        """Return an ASGI application with vLLM's HTTP API."""
        from alphaapollo.engines.vllm.http_api import build_http_app  # imports FastAPI

        return build_http_app(self, self.stream_outputs, settings)

    def stream_outputs(
        self, token_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImageInput] = ()
    ) -> AsyncIterator[RequestOutput]:
        """Run a request, and yield its output in vLLM's form."""
        raise NotImplementedError


class OtherEngine(FrontEnd):
    """Front end of an engine with `generate`. Streamed answers arrive in one piece."""

    def __init__(self, spec: EngineSpec, generate: Callable[[list[int], Sampling, str], Awaitable[Completion]]):
        os.environ.update(build_vllm_environment(spec))
        log_library_to_file("vllm", spec.log_path)
        import_vllm()
        super().__init__(spec.model_path, spec.chat_tokenizer, spec.trust_remote_code, spec.max_model_len)
        self._generate = generate

    async def stream_outputs(
        self, token_ids: list[int], params: SamplingParams, request_id: str, images: Sequence[ImageInput] = ()
    ) -> AsyncIterator[RequestOutput]:
        from vllm.outputs import RequestOutput

        sampling = read_sampling_params(params)
        seeds = [sampling.seed + index for index in range(params.n)]
        calls = [self._generate(token_ids, replace(sampling, seed=seed), request_id) for seed in seeds]
        answers = await asyncio.gather(*calls)
        outputs = [self._build_output(index, answer, params, sampling) for index, answer in enumerate(answers)]
        cached = answers[0].num_cached_tokens
        yield RequestOutput(request_id, None, token_ids, None, outputs, finished=True, num_cached_tokens=cached)

    def _build_output(self, index: int, answer: Completion, params: SamplingParams, sampling: Sampling) -> Any:
        from vllm.logprobs import FlatLogprobs, Logprob
        from vllm.outputs import CompletionOutput, WeightVersionSpan

        ids, decode = list(answer.token_ids), self.renderer.tokenizer.decode
        is_ended_by_token = ids[-1] in sampling.stop_token_ids
        text = decode(ids[: len(ids) - is_ended_by_token], skip_special_tokens=params.skip_special_tokens)
        stops = [] if is_ended_by_token else [stop for stop in sampling.stop if stop in text]
        if stops:
            text = cut_at_stop(text, stops, params.include_stop_str_in_output)
        logprobs: Any = FlatLogprobs() if params.flat_logprobs else []
        for token, logprob in zip(ids, answer.logprobs, strict=True):
            logprobs.append({token: Logprob(logprob, None, decode([token]))})
        spans, end = [], 0
        for version, count in answer.weight_versions:
            spans.append(WeightVersionSpan(start=end, end=end + count, version=str(version)))
            end += count
        return CompletionOutput(
            index,
            text,
            ids,
            cumulative_logprob=sum(answer.logprobs),
            logprobs=logprobs,
            finish_reason=str(answer.stop_reason),
            stop_reason=stops[0] if stops else None,
            weight_versions=spans,
        )


def read_sampling_params(params: SamplingParams) -> Sampling:
    """Convert vLLM's sampling settings. Raises ValueError for settings that only vLLM's engine supports."""
    unsupported = [name for name in UNSUPPORTED if getattr(params, name)]
    unsupported += ["top_logprobs"] * bool(params.logprobs) + ["repetition_penalty"] * (params.repetition_penalty != 1)
    if unsupported:
        raise ValueError(f"{', '.join(unsupported)}: this engine does not support these settings. Remove them.")
    return Sampling(
        max_tokens=params.max_tokens or 1,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=random.getrandbits(31) if params.seed is None else params.seed,
        stop_token_ids=tuple(params.all_stop_token_ids),
        stop=tuple([params.stop] if isinstance(params.stop, str) else params.stop or ()),
        includes_stop=params.include_stop_str_in_output,
    )
