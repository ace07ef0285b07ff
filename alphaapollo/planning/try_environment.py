"""Try the environment's `reset`, an agent's program and the user's reward function, before models are loaded."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Never

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, GenerationData, Model, Reward
from alphaapollo.engines.http_api import AgentSession, SessionLimits
from alphaapollo.environments.base import EnvironmentFailure, Services, get_environment_spec, wrap_environment_errors
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.judges.graders import JUDGES
from alphaapollo.rollout.agents.runner import open_agent_runner
from alphaapollo.rollout.context import check_reset_reply
from alphaapollo.rollout.episode import EnvironmentCaller
from alphaapollo.types import JsonObject, Message, Prompt, Sampling, Score

TRIAL_ANSWERS = ("<answer>TRUTH</answer>", r"The answer is \boxed{TRUTH}.", "TRUTH", "I do not know.", "")
PLACEHOLDER = re.compile(r"(?<![\w\\}])\{([a-z_]+)\}")  # excludes LaTeX such as \boxed{n}


def try_environment(env: Env, prompts: Sequence[Prompt], model: Model, data: Data | GenerationData) -> list[str]:
    """Reset the environment once for each prompt, or run an agent's program for the first prompt. Returns notices.

    Raises ValueError if the environment or the program cannot be used.
    """
    if env.env_name != "agent":
        return asyncio.run(try_environment_resets(env, prompts))
    return try_agent(env, prompts[0], model, data)


async def try_environment_resets(config: Env, prompts: Sequence[Prompt]) -> list[str]:
    """Create, reset and close the environment once for each prompt. Returns notices about env.prompt.

    Raises ValueError if the environment cannot be created or reset, returns an invalid first observation, or exceeds
    env.episode_timeout.
    """
    tools, shown = await open_toolbox(config), ""
    try:
        for prompt in prompts:
            first = await _reset_environment(config, Services(_deny_in_reset, config, tools, _deny_in_reset), prompt)
            shown += first if isinstance(first, str) else "".join(message["content"] for message in first)
    finally:
        if tools is not None:
            await tools.close()
    template = config.prompt
    return [
        f"env.prompt: {{{name}}} is not filled in, because the environment has no such value."
        for name in dict.fromkeys(PLACEHOLDER.findall(template))
        if f"{{{name}}}" in shown
    ]


async def try_reward_function(
    prompts: Sequence[Prompt], reward: Reward, custom: CustomRewardFunction
) -> tuple[list[str], list[Score]]:
    """Grade TRIAL_ANSWERS to the first prompt with the user's reward function, in a grader process. Returns notices,
    and the scores. Raises ValueError if no prompt has a column that the function requires, or the function fails on
    most answers."""
    prompt, (scores, columns) = prompts[0], await grade_trial_answers(prompts[0], reward, custom)
    for column in columns:
        if not any(column in one.extra_info for one in prompts):
            raise ValueError(
                f"{custom.path}: {', '.join(custom.names)} needs {column!r}, but the data has no such column, only "
                f"{', '.join(prompt.extra_info) or 'those of every row'}. Rename the column or the parameter."
            )
    failed = {answer: score.reason for answer, score in scores.items() if score.outcome.failed}
    function = f"{custom.path}: {', '.join(custom.names)}" if custom.path else f"{reward.custom_module}: a component"
    notices = [
        f"{function} fails on {len(failed)} of {len(scores)} trial answers to row {prompt.id}, e.g. {answer!r}: "
        f"{reason}. Return a number or a dict of numbers for every answer."
        for answer, reason in [*failed.items()][:1]
    ]
    if 2 * len(failed) > len(scores):
        raise ValueError(notices[0])
    return notices, [*scores.values()]


async def grade_trial_answers(
    prompt: Prompt, reward: Reward, custom: CustomRewardFunction
) -> tuple[dict[str, Score], Sequence[str]]:
    """Grade TRIAL_ANSWERS to a prompt in a grader process. Returns {answer: score}, and the columns that the user's
    function requires. The components of a policy that judges itself are left out, because no engine runs yet."""
    tried: JsonObject = {"num_workers": 1}
    if reward.judge.backend == "policy":
        tried["components"] = {name: weight for name, weight in reward.components.items() if name not in JUDGES}
        tried["required"] = [name for name in reward.required if name not in JUDGES]
    client = RewardClient(reward.model_copy(update=tried), custom)
    try:
        await client.start()
        answers = [answer.replace("TRUTH", prompt.ground_truth_text or "") for answer in TRIAL_ANSWERS]
        return {answer: await client.score(prompt, answer) for answer in answers}, client.loaded.columns
    finally:
        await client.close()


async def _reset_environment(config: Env, services: Services, prompt: Prompt) -> list[Message] | str:
    """Create, reset and close the environment once. Returns its first observation."""
    where = f"env.env_name={config.env_name}, row {prompt.id}"
    caller, seconds = EnvironmentCaller(), config.episode_timeout
    try:
        with wrap_environment_errors("creation"):
            environment = get_environment_spec(config.env_name).factory(services)
        try:
            return check_reset_reply(await caller.call(TimeLimit(seconds), environment, "reset", prompt))
        finally:
            await caller.call(TimeLimit(seconds), environment, "close")
    except TimeoutError as error:
        raise ValueError(
            f"{where}: the environment did not start within env.episode_timeout={seconds:g} s. Fix the environment, or "
            "raise env.episode_timeout."
        ) from error
    except EnvironmentFailure as failure:
        raise ValueError(
            f"{where}: the environment did not start: {failure}. Fix the environment, its settings (env.*), or the row."
        ) from failure


def _deny_in_reset(*_: object) -> Never:
    raise RuntimeError("reset() uses services.parse_calls or services.score. Move this code to step().")


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
    from alphaapollo.engines.vllm.recorded_engine import ANSWER, RecordedEngine

    agent = env.agent
    name = f"env.agent.path={agent.path}" if agent.path else f"env.agent.command={agent.command}"
    limits = SessionLimits(data.max_length, agent.max_requests, env.max_tokens_per_turn)
    session = AgentSession(Sampling(data.max_response_length), lambda number: number, limits)
    async with open_agent_runner(RecordedEngine(model, data.max_length), env, data) as runner:
        try:
            result = await runner.run_program(prompt, 0, session, TimeLimit(agent.timeout))
        except TimeoutError as error:
            limit = f"env.agent.timeout={agent.timeout:g} s"
            raise ValueError(f"{name}: the program did not end within {limit} in a trial.") from error
    if not session.num_started:
        reason = f" It failed: {result.error}" if result.error else ""
        raise ValueError(
            f"{name}: the program, tried on row {prompt.id}, made no request to the policy.{reason} Use the "
            "address and key in endpoint, or in the variables OPENAI_BASE_URL and OPENAI_API_KEY."
        )
    if session.overflow:
        return [f"{name}: the first request is too long. {session.overflow}"]
    if result.error and not session.requests:
        raise ValueError(
            f"{name}: the program, tried on row {prompt.id}, got no answer from the policy: {result.error}"
        )
    if result.error:
        return [f"{name}: the program fails if the policy answers {ANSWER!r}: {result.error.splitlines()[0]}"]
    return []
