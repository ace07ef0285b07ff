"""Models of a run (`models.NAME`): OpenAI-compatible servers, and engines that this run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alphaapollo.config.resolve import resolve_device, resolve_inference_rollout
from alphaapollo.config.schema import Model, Rollout
from alphaapollo.config.schema.data import PromptData
from alphaapollo.controller.placement import detect_machine
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import find_stop_ids, load_tokenizer
from alphaapollo.engines.protocol import Engine
from alphaapollo.environments.base import EnvironmentFailure
from alphaapollo.plugins.evolving.roles import ModelReply
from alphaapollo.plugins.evolving.settings import EvolvingConfig, ServedModel
from alphaapollo.rewards.openai_connection import MALFORMED_RESPONSE_ERRORS, make_connection_options
from alphaapollo.rollout.token_context import PromptRenderer
from alphaapollo.types import Message, Sampling
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.redaction import redact, replace_surrogates
from alphaapollo.utils.text import cut_at_stop

MAX_SERVER_SEED = 2**31  # not every server accepts larger seeds
REQUEST_ERRORS = (400, 404, 413, 422)  # status codes caused by the request; other codes count as server failures


class ModelCallError(Exception):
    """Error for a model call that failed after all retries. server_down: the server, not the request, is the cause."""

    def __init__(self, reason: str, server_down: bool = False):
        super().__init__(replace_surrogates(redact(reason)))
        self.server_down = server_down


class ServerClient:
    """Client of an OpenAI-compatible server. The openai package retries failed requests (models.NAME.max_retries).

    `time_limit`: seconds after which a call ends, with or without a reply; None: unlimited. Raises ValueError if the
    openai package or the API key is missing.
    """

    def __init__(self, name: str, model: ServedModel):
        connection = make_connection_options(f"models.{name}", model.base_url, model.api_key_env)
        import openai

        self._model = model
        self.time_limit: float | None = model.timeout * (1 + model.max_retries)
        self._client = openai.AsyncOpenAI(**connection, timeout=model.timeout, max_retries=model.max_retries)

    async def generate(self, messages: Sequence[Message], sampling: Sampling, call_name: str) -> ModelReply:
        """Return the next assistant message. Raises ModelCallError if the call fails after all retries."""
        import openai

        try:
            reply: Any = await self._client.chat.completions.create(
                model=self._model.name,
                messages=list(messages),  # type: ignore[arg-type]  # roles are plain strings
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed % MAX_SERVER_SEED,
            )
            choice, usage = reply.choices[0], reply.usage
            text, tokens = replace_surrogates(choice.message.content), int(usage.completion_tokens)
            return ModelReply(text, sampling.seed, int(usage.prompt_tokens), tokens, str(choice.finish_reason))
        except openai.APIStatusError as error:
            server_down = error.status_code not in REQUEST_ERRORS
            raise ModelCallError(f"status {error.status_code}: {error}", server_down) from error
        except (openai.APIError, *MALFORMED_RESPONSE_ERRORS) as error:  # no connection, or not OpenAI's format
            raise ModelCallError(f"no readable reply: {type(error).__name__}: {error}", server_down=True) from error

    def fits_prompt_limit(self, messages: Sequence[Message]) -> bool:
        """Return True, because the prompt limit of a server is unknown."""
        return True

    async def close(self) -> None:
        await self._client.close()


class EngineClient:
    """Client of an inference engine in this process, with the interface of ServerClient.

    Messages are rendered with the model's chat template. Prompts above `data.max_prompt_length`
    tokens are truncated or raise ModelCallError (`data.truncation`). Each call in flight needs its own `call_name`.
    """

    time_limit: float | None = None

    def __init__(self, engine: Engine, renderer: Renderer, data: PromptData, rollout: Rollout):
        self.engine, self.renderer, self.rollout = engine, renderer, rollout
        self._prompts = PromptRenderer(renderer.encode_prompt, data.max_prompt_length, data.truncation)

    async def generate(self, messages: Sequence[Message], sampling: Sampling, call_name: str) -> ModelReply:
        try:
            token_ids = self._prompts(list(messages))
        except EnvironmentFailure as error:
            raise ModelCallError(str(error)) from error
        stop = self.rollout.stop_strings
        sampling = replace(sampling, stop_token_ids=self.stop_token_ids, stop=stop)
        completion = await self.engine.generate(token_ids, sampling, call_name)
        text, count = self.renderer.decode(completion.token_ids), len(completion.token_ids)
        text = cut_at_stop(text, stop, self.rollout.include_stop_str_in_output)
        return ModelReply(text, sampling.seed, len(token_ids), count, completion.stop_reason.value)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        stops = find_stop_ids(self.renderer.tokenizer, self.rollout.stop_strings)
        return (*self.renderer.eos_token_ids, *stops)

    def fits_prompt_limit(self, messages: Sequence[Message]) -> bool:
        return self._prompts.is_within_limit(list(messages))

    async def close(self) -> None:
        await self.engine.close()


ModelClient = ServerClient | EngineClient


def make_clients(config: EvolvingConfig) -> dict[str, ModelClient]:
    """Create the clients of all models by name, with engines that are not started. All engines share the CPU cores or
    the GPU. Raises ValueError if an engine would reject a model or its settings, or a server cannot be used."""
    served = make_served_models(config)
    return {
        name: _make_engine_client(config, name, served) if name in served else ServerClient(name, model)
        for name, model in config.models.items()
    }


def make_served_models(config: EvolvingConfig) -> dict[str, Model]:
    """Return the models that this run serves, by name."""
    return {
        name: Model(path=model.path, tokenizer_path=model.tokenizer_path, trust_remote_code=model.trust_remote_code)
        for name, model in config.models.items()
        if model.path
    }


def _make_engine_client(config: EvolvingConfig, name: str, served: Mapping[str, Model]) -> EngineClient:
    from alphaapollo.engines.factory import make_engine
    from alphaapollo.engines.types import EngineSpec
    from alphaapollo.models.load import check_vocabulary_size  # imports torch
    from alphaapollo.planning.model_requirements import ModelUse, check_models  # imports torch

    model, data, key = served[name], config.data, f"models.{name}.path"
    check_models([ModelUse(key, model, engine=config.rollout, lengths=data)])
    tokenizer_path = model.tokenizer_path or model.path
    tokenizer = load_tokenizer(tokenizer_path, model.trust_remote_code)
    check_vocabulary_size(model, tokenizer, key)
    machine = detect_machine()
    device = resolve_device(config.trainer.device, machine.num_gpus)
    shared = config.rollout.model_copy(update={"num_engines": len(served)})
    rollout = resolve_inference_rollout(shared, Model(), device, 1, machine.num_cores)
    spec = EngineSpec(
        index=[*served].index(name),
        model_path=model.path,
        trust_remote_code=model.trust_remote_code,
        rollout=rollout,
        device=device,
        dtype=rollout.dtype,
        max_model_len=data.max_length,
        log_path=str(config.trainer.folder.resolve() / "logs" / f"engine_{name}.log"),
        chat_tokenizer=tokenizer_path if config.env.env_name == "agent" else "",
        tokenizer_path=tokenizer_path,
    )
    renderer = Renderer(tokenizer, data.apply_chat_template_kwargs, model_path=model.path)
    return EngineClient(make_engine(spec), renderer, data, rollout)


def report_engine_progress(clients: Mapping[str, EngineClient]) -> None:
    """Count progress of the engine processes as progress of this process, for stall detection."""
    HEARTBEAT.watch_helper_processes(
        lambda: sum(client.engine.get_progress_counter() for client in clients.values()),
        lambda: {
            pid: f"the engine {'worker' if number else 'core'} of models.{name}"
            for name, client in clients.items()
            for number, pid in enumerate(client.engine.list_pids())
        },
    )
