"""vLLM's own HTTP API (OpenAI chat completions and responses, Anthropic messages) over a rollout engine, for agents.
Evaluation suites also use OpenAI completions; their requests belong to no session, and keep their own settings.

vLLM parses requests, renders chats, parses tool calls and streams answers. This module changes two steps:

    rendering   the beginning of a chat whose tokens are known is not rendered again
    sampling    the policy's sampling settings replace the client's, and answers are recorded
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace

from fastapi import FastAPI
from vllm.entrypoints.anthropic.api_router import attach_router as attach_anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completions
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams

from alphaapollo.data.images import load_image_processor
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import find_stop_ids
from alphaapollo.engines.agent_sessions import CURRENT_REQUEST, Answer, Request
from alphaapollo.engines.types import MODEL_NAME, EngineError, HttpApiSettings
from alphaapollo.engines.vllm.images import ChatImageReader
from alphaapollo.engines.vllm.settings import VllmObject, build_completion, make_sampling_params
from alphaapollo.types import ImageInput, JsonObject, Sampling

SENTINEL = "\u2063answer\u2063"  # replaces a sampled answer in a chat that is rendered
EXCLUSION_SETTINGS = ("logit_bias", "bad_words", "allowed_token_ids", "min_tokens")
"""Settings of a request that exclude tokens from sampling, unless they are empty or 0."""
CLIENT_SETTINGS = (
    *("n", "stop", "include_stop_str_in_output", "output_kind", "skip_special_tokens"),
    "spaces_between_special_tokens",
)
"""Settings that a client may choose, because none of them changes the distribution that tokens are sampled from."""

StreamOutputs = Callable[..., AsyncIterator[RequestOutput]]
"""`stream(token_ids, params, request_id, images=images)`: sample, and yield vLLM's RequestOutputs."""


class AnthropicApi(AnthropicServingMessages):
    """Anthropic's API, in which an empty list of tools needs no parser of tool calls."""

    @classmethod
    def _resolve_tools(cls, request: VllmObject) -> object:
        return super()._resolve_tools(request) or None


def build_http_app(engine: VllmObject, stream: StreamOutputs, settings: HttpApiSettings) -> FastAPI:
    """Build the ASGI application. Requests of sessions must set CURRENT_REQUEST. engine: vLLM's AsyncLLM, or a
    FrontEnd. Raises ValueError if vLLM has no parser with the name in the settings."""
    app = FastAPI(openapi_url=None)
    for attach in (attach_chat, attach_completions, attach_responses, attach_anthropic, attach_models):
        attach(app)
    init_exception_handler(app)
    model = engine.model_config.model
    renderer = Renderer(engine.renderer.tokenizer, settings.template_arguments, model_path=model)
    client = PolicyClient(engine, stream, settings, renderer)
    models = OpenAIServingModels(client, [BaseModelPath(name=MODEL_NAME, model_path=model)])
    chat_options = {"chat_template": None, "chat_template_content_format": "auto", "request_logger": None}
    parser_options = {
        "enable_auto_tools": bool(settings.tool_parser),
        "tool_parser": settings.tool_parser or None,
        "reasoning_parser": settings.reasoning_parser,
        "default_chat_template_kwargs": renderer.template_arguments,
    }
    try:
        online = OnlineRenderer(engine.model_config, engine.renderer, **chat_options, **parser_options)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"env.tool_parser={settings.tool_parser} or env.agent.reasoning_parser={settings.reasoning_parser} "
            f"does not work with this model: {error}"
        ) from error
    online.preprocess_chat = client.keep_parsing_context(online.preprocess_chat)
    state, options = app.state, {**chat_options, **parser_options}
    state.args = SimpleNamespace(log_error_stack=False)  # read by vLLM's error handlers
    state.openai_serving_models, state.online_renderer = models, online
    state.serving_tokenization = ServingTokenization(models, online, **chat_options)
    state.openai_serving_chat = OpenAIServingChat(client, models, "assistant", online_renderer=online, **options)
    state.anthropic_serving_messages = AnthropicApi(client, models, "assistant", online_renderer=online, **options)
    state.openai_serving_completion = OpenAIServingCompletion(
        client, models, online_renderer=online, request_logger=None
    )
    state.openai_serving_responses = OpenAIServingResponses(client, models, online, **options)
    return app


class PolicyClient:
    """vLLM's EngineClient, which renders chats without changing known tokens, samples from the policy and records all
    answers. Raises ValueError if a vision-language model has no usable image processor."""

    errored = False  # `generate` reports the death of the engine to the session

    def __init__(self, engine: VllmObject, stream: StreamOutputs, settings: HttpApiSettings, text_renderer: Renderer):
        self._engine, self._stream, self._settings, self._renderer = engine, stream, settings, text_renderer
        renderer, model = engine.renderer, engine.model_config
        processor = load_image_processor(model.model, renderer.tokenizer, model.trust_remote_code)
        self._images = ChatImageReader(processor, settings.allow_image_urls)
        self._render = renderer.render_messages  # synchronous: a thread per request takes more time than rendering
        self._render_multimodal = renderer.render_messages_async  # may load audio
        renderer.render_messages_async = self.render

    def __getattr__(self, name: str) -> VllmObject:  # configuration and health of the engine
        return getattr(self._engine, name)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit every request. Sessions limit the number of requests."""

    def keep_parsing_context(self, preprocess: Callable[..., Awaitable[object]]) -> Callable[..., object]:
        """Wrap OnlineRenderer.preprocess_chat, through which the requests of all protocols pass, to keep the request
        and its parser. `generate` uses them to parse its answers."""

        async def preprocess_and_keep(
            request: VllmObject, messages: object, *, parser: VllmObject = None, **arguments: object
        ) -> object:
            if (current := CURRENT_REQUEST.get()) is not None:
                current.parse_answer = partial(self._parse_answer, request, parser)
                _set_tool_constraints(request)
            return await preprocess(request, messages, parser=parser, **arguments)

        return preprocess_and_keep

    def _parse_answer(
        self, request: VllmObject, parser_class: VllmObject, text: str, token_ids: list[int]
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return the content and the tool calls of an answer, as vLLM sends them to the client."""
        if parser_class is None:
            return text, []
        variables = getattr(request, "chat_template_kwargs", None) or self._settings.template_arguments
        tokenizer = self._engine.renderer.tokenizer
        parser = parser_class(
            tokenizer, request.tools, chat_template_kwargs=variables, model_config=self._engine.model_config
        )
        _, content, calls = parser.parse(text, request, bool(self._settings.tool_parser), token_ids)
        return content or "", [(call.name, call.arguments) for call in calls or ()]

    async def render(self, messages: list[JsonObject], params: VllmObject) -> tuple[list[JsonObject], VllmObject]:
        """Return the parsed chat and its prompt, like vLLM's BaseRenderer.render_messages_async."""
        request, images = CURRENT_REQUEST.get(), list[tuple[ImageInput, ...]]()
        if request is not None:
            chat_images = await self._images.read(messages)
            messages, images = self._renderer.split_control_strings(chat_images.messages), chat_images.images
            arguments = self._renderer.split_tools(params.chat_template_kwargs)
            params = replace(params, chat_template_kwargs=arguments)
        if any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages):
            conversation, prompt = await self._render_multimodal(messages, params)
        else:
            conversation, prompt = self._render(messages, params)
        if request is None or "prompt" not in prompt:  # vLLM's own warm-up, or a renderer that returns no text
            return conversation, prompt
        request.images = tuple(chain.from_iterable(images))
        request.session.encoded_images.update(chat_images.sent)
        chat = chat_images.add_digests(conversation) if request.images else conversation
        variables = json.dumps([params.chat_template, params.chat_template_kwargs], sort_keys=True, default=str)
        token_ids: list[int] = []
        if (span := request.find_history(chat, variables)) is not None and request.parent is not None:
            token_ids = self._extend(request.parent.token_ids, span, chat, images, params)
            if not token_ids:
                request.discard_history()
        token_ids = token_ids or self._images.expand_placeholders(self._encode(prompt["prompt"]), images)
        request.check_prompt(token_ids)
        return conversation, TokensPrompt(prompt_token_ids=token_ids)

    def _extend(
        self,
        known_ids: list[int],
        span: tuple[int, int],
        conversation: list[JsonObject],
        images: list[tuple[ImageInput, ...]],
        params: VllmObject,
    ) -> list[int]:
        """Return the known tokens of a chat and those that follow them: the end of the sampled answer's turn, and the
        messages after it. Empty if the chat template does not show the answer. span: see Request.find_history. images:
        images of each message."""
        start, end = span
        calls = [call for message in conversation[start:end] for call in message.get("tool_calls") or ()]
        replacement: JsonObject = {"role": "assistant", "content": "" if calls else SENTINEL}
        if calls:  # the sentinel is the only argument of the last call
            arguments = ["{}" for _ in calls[1:]] + [json.dumps({"_": SENTINEL}, ensure_ascii=False)]
            replacement["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": text}}
                for call, text in zip(calls, arguments, strict=True)
            ]
        _, prompt = self._render([*conversation[:start], replacement, *conversation[end:]], params)
        _, _, after = prompt["prompt"].partition(SENTINEL)
        if not after or SENTINEL in after:
            return []
        following = self._images.expand_placeholders(self._renderer.find_turn_end(self._encode(after)), images[end:])
        return [*known_ids, *self._renderer.skip_turn_end(following, known_ids[-1])] if following else []

    def _encode(self, text: str) -> list[int]:
        return self._renderer.encode([text])[0]

    async def generate(
        self, prompt: VllmObject, sampling_params: SamplingParams, request_id: str, **_: object
    ) -> AsyncIterator[RequestOutput]:
        """Sample answers to a rendered chat with the policy's settings. Records them before the last output."""
        request, prompt_ids = CURRENT_REQUEST.get(), list(prompt["prompt_token_ids"])
        stop_ids = find_stop_ids(self._renderer.tokenizer, sampling_params.stop or ())
        if request is None:
            if prompt["type"] != "token":
                raise ValueError("Images of evaluation suites are not supported. Use a task without images.")
            generation_config = {"eos_token_id": [*self._renderer.eos_token_ids, *stop_ids]}
            sampling_params.update_from_generation_config(generation_config, self._renderer.tokenizer.eos_token_id)
            async for output in self._stream(prompt_ids, sampling_params, request_id):
                yield output
            return
        excludes_tokens = any(getattr(sampling_params, name) for name in EXCLUSION_SETTINGS)
        is_constrained = sampling_params.structured_outputs is not None or excludes_tokens
        if request_id.startswith("resp_"):
            request_id = request_id.rpartition("_")[0]  # drop the number of the round; here a response has one round
        sampling = request.start_sampling(request_id, prompt_ids, sampling_params.max_tokens or 1, is_constrained)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *stop_ids))
        params = _make_policy_params(sampling_params, sampling, is_constrained)
        if request.earlier is not None:
            self._record(request, request.earlier.outputs)
            repeated = _copy_output(request.earlier.outputs)
            repeated.request_id = request_id
            yield repeated
            return
        collected: RequestOutput | None = None
        try:
            async for output in self._stream(prompt_ids, params, request_id, images=request.images):
                if not params.detokenize:
                    self._decode_answers(output, params.skip_special_tokens)
                if collected is None:
                    collected = _copy_output(output)
                else:
                    collected.add(_copy_output(output), aggregate=params.output_kind == RequestOutputKind.DELTA)
                if output.finished:
                    self._record(request, collected)
                yield output
        except EngineError as error:
            request.record_engine_error(error)
            raise

    def _decode_answers(self, output: RequestOutput, skip_special_tokens: bool) -> None:
        """Set the text of complete answers: their tokens without the token that ended them."""
        for answer in output.outputs:
            ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
            answer.text = self._engine.renderer.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _record(self, request: Request, output: RequestOutput) -> None:
        assert request.parse_answer is not None
        answers = []
        for answer in output.outputs:
            completion = build_completion(answer, output)
            content, calls = request.parse_answer(answer.text, list(answer.token_ids))
            text = self._renderer.decode(answer.token_ids)
            marks = self._renderer.marks.find(request.prompt_ids, answer.token_ids)
            answers.append(Answer(request, completion, text, content, calls, marks=marks))
        request.record_answers(answers, output)


def _set_tool_constraints(request: VllmObject) -> None:
    """Sample freely if the model may choose whether it calls a tool, else constrain all arguments to their schemas,
    which vLLM does for `strict` tools only."""
    is_free = getattr(request, "tool_choice", None) in (None, "auto")
    if is_free:
        request.parallel_tool_calls = True
    for tool in request.tools or ():
        function = getattr(tool, "function", tool)
        if hasattr(function, "strict"):
            function.strict = not is_free


def _make_policy_params(requested: SamplingParams, sampling: Sampling, is_constrained: bool) -> SamplingParams:
    """Return the policy's sampling settings, with those settings of a request that a client may choose."""
    chosen = {name: getattr(requested, name) for name in CLIENT_SETTINGS}
    chosen["stop"] = [*(requested.stop or ()), *sampling.stop]
    chosen["include_stop_str_in_output"] |= sampling.includes_stop
    if is_constrained:
        chosen |= {name: getattr(requested, name) for name in ("structured_outputs", *EXCLUSION_SETTINGS)}
    return make_sampling_params(
        sampling,
        **chosen,
        stop_token_ids=[*(requested.stop_token_ids or ()), *sampling.stop_token_ids],
        logprobs=requested.logprobs or 0,
        flat_logprobs=requested.logprobs is None,
        # vLLM decodes token by token, which is slow. PolicyClient decodes answers that are sent as a whole.
        detokenize=bool(chosen["stop"])
        or requested.logprobs is not None
        or requested.output_kind != RequestOutputKind.FINAL_ONLY,
    )


def _copy_output(output: RequestOutput) -> RequestOutput:
    """Copy what RequestOutput.add changes."""
    copied = copy(output)
    copied.outputs = [copy(answer) for answer in output.outputs]
    for answer in copied.outputs:
        answer.token_ids = list(answer.token_ids)
        answer.logprobs = answer.logprobs[:] if answer.logprobs else answer.logprobs
        if answer.sampling_mask is not None:
            answer.sampling_mask = replace(answer.sampling_mask, token_ids=[*answer.sampling_mask.token_ids])
    return copied
