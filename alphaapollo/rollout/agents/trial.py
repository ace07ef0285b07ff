"""Try the user's program once against a canned engine, before workers start."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Protocol

from alphaapollo.config.schema import Agent, Data, Env, GenerationData, Model
from alphaapollo.engines.http_api import HttpApiSettings
from alphaapollo.rollout.agents.endpoint import Endpoint, SessionGate
from alphaapollo.rollout.agents.programs import ProgramRunner
from alphaapollo.rollout.agents.runner import make_environment_variables, make_task
from alphaapollo.rollout.agents.session import Session, SessionLimits
from alphaapollo.types import Prompt, Sampling
from alphaapollo.utils.time_limit import TimeLimit


class HttpEngine(Protocol):
    """Engine with an HTTP API."""

    def build_http_app(self, settings: HttpApiSettings) -> object: ...


def make_http_settings(env: Env, template_arguments: Mapping[str, object]) -> HttpApiSettings:
    """Return the settings of the engine's HTTP API."""
    agent = env.agent
    return HttpApiSettings(agent.model_names, env.tool_parser, agent.reasoning_parser, template_arguments)


async def start_endpoint(engine: HttpEngine, settings: HttpApiSettings) -> Endpoint:
    """Start the HTTP endpoint of an engine. Raises ValueError if a parser does not exist."""
    app = await asyncio.to_thread(engine.build_http_app, settings)
    endpoint = Endpoint(SessionGate(app))  # type: ignore[arg-type]
    await endpoint.start()
    return endpoint


def try_agent(env: Env, prompt: Prompt, model: Model, data: Data | GenerationData) -> list[str]:
    """Run the program once for `prompt`, with vLLM's HTTP API and canned answers, in a subprocess. Returns notices.

    Raises ValueError if the program cannot be loaded or makes no request to the policy. It may fail after a request,
    because the canned answer may not be what it needs.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_try_in_subprocess, env, prompt, model, data).result()


def _try_in_subprocess(env: Env, prompt: Prompt, model: Model, data: Data | GenerationData) -> list[str]:
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"})
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    return asyncio.run(_run_trial(env, prompt, model, data))


async def _run_trial(env: Env, prompt: Prompt, model: Model, data: Data | GenerationData) -> list[str]:
    from alphaapollo.engines.vllm.canned import ANSWER, CannedEngine

    agent = env.agent
    programs = ProgramRunner(agent)
    await programs.start()
    settings = make_http_settings(env, data.apply_chat_template_kwargs)
    endpoint = await start_endpoint(CannedEngine(model, data.max_length), settings)
    limits = SessionLimits(data.max_length, agent.max_requests, env.max_tokens_per_turn)
    session = Session(Sampling(data.max_response_length), lambda number: number, limits)
    time_limit = TimeLimit(agent.timeout)
    try:
        with endpoint.gate.open_session(session, time_limit):
            async with time_limit.count_time():
                variables = make_environment_variables(endpoint.url, session.token, agent.model_names[0])
                result = await programs.run(make_task(prompt, 0, 0), variables)
    except TimeoutError as error:
        limit = f"env.agent.timeout={agent.timeout:g} s"
        raise ValueError(f"{_name(agent)}: the program did not end within {limit} in a trial.") from error
    finally:
        await endpoint.close()
        await programs.close()
    if not session.num_started:
        reason = f" It failed: {result.error}" if result.error else ""
        raise ValueError(
            f"{_name(agent)}: the program, tried on row {prompt.id}, made no request to the policy.{reason} Use the "
            "address and key in endpoint, or in the variables OPENAI_BASE_URL and OPENAI_API_KEY."
        )
    if session.overflow:
        return [f"{_name(agent)}: the first request is too long. {session.overflow}"]
    if result.error and not session.requests:
        raise ValueError(
            f"{_name(agent)}: the program, tried on row {prompt.id}, got no answer from the policy: {result.error}"
        )
    if result.error:
        return [f"{_name(agent)}: the program fails if the policy answers {ANSWER!r}: {result.error.splitlines()[0]}"]
    return []


def _name(agent: Agent) -> str:
    return f"env.agent.path={agent.path}" if agent.path else f"env.agent.command={agent.command}"
