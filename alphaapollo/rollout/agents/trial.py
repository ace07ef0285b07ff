"""Try the user's program once against a canned engine, before workers start."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from alphaapollo.config.schema import Agent, Data, Env, GenerationData, Model
from alphaapollo.rollout.agents.runner import open_agent_runner
from alphaapollo.rollout.agents.session import Session, SessionLimits
from alphaapollo.types import Prompt, Sampling
from alphaapollo.utils.time_limit import TimeLimit


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
    limits = SessionLimits(data.max_length, agent.max_requests, env.max_tokens_per_turn)
    session = Session(Sampling(data.max_response_length), lambda number: number, limits)
    async with open_agent_runner(CannedEngine(model, data.max_length), env, data) as runner:
        try:
            result = await runner.run_program(prompt, 0, session, TimeLimit(agent.timeout))
        except TimeoutError as error:
            limit = f"env.agent.timeout={agent.timeout:g} s"
            raise ValueError(f"{_name(agent)}: the program did not end within {limit} in a trial.") from error
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
