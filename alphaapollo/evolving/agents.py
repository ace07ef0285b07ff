"""Proposers that are programs of the user (env.env_name=agent).

A program runs in a session of its own for each candidate. Each of its requests is a call of the proposer's model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Never

from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.engines.http_api import AgentSession, Request, list_new_messages
from alphaapollo.engines.protocol import EngineError
from alphaapollo.environments.base import ScoreFn
from alphaapollo.evolving.budget import EvolutionStopped, compute_call_price
from alphaapollo.evolving.model_clients import EngineClient, ModelCallError
from alphaapollo.evolving.pool import CandidateId, ModelCall, Usage
from alphaapollo.evolving.role_calls import RoleModelCaller, Transcript
from alphaapollo.evolving.roles import ModelReply, make_user_chat
from alphaapollo.rollout.agents.runner import AgentRunner, open_agent_runner
from alphaapollo.rollout.context import check_messages
from alphaapollo.rollout.episode import EpisodeTask
from alphaapollo.types import EpisodeEnd, Message, Outcome, Prompt, Sampling, Score, Turn


class AgentProposer:
    """Proposer that runs the program with one model. At most models.NAME.max_concurrent programs run at once."""

    def __init__(self, caller: RoleModelCaller, runner: AgentRunner, sampling: Sampling, num_slots: int):
        self._caller, self._runner, self._sampling = caller, runner, sampling
        self._slots = asyncio.Semaphore(num_slots)

    async def propose(
        self, prompt: Prompt, candidate_id: CandidateId, build_prompt: Callable[[list[Message]], list[Message]]
    ) -> Transcript:
        """Run the program with the proposer's prompt as the content of its task. Raises like `call_model`."""
        first = make_user_chat(prompt.content) if isinstance(prompt.content, str) else list(prompt.content)
        messages = check_messages(build_prompt(first), "proposer.build")
        key = f"{candidate_id.key}/proposer/"
        task = EpisodeTask(
            replace(prompt, content=messages),
            candidate_id.index,
            _make_no_environment,
            self._sampling,
            lambda number: self._caller.derive_call_seed(f"{key}turn{number}"),
            name=key,
        )
        async with self._slots:
            session, end, score = await self._runner.run_session(task)
        return make_transcript(messages, session, end, score)


def make_transcript(prompt: list[Message], session: AgentSession, end: EpisodeEnd, score: Score) -> Transcript:
    """Make the transcript of a session: the chat that ends with its last answer. prompt: used if there is no answer."""
    transcript = Transcript(prompt, len(prompt), score=score, ended_by_environment=True)
    if session.answers:
        path = session.answers[-1].path
        chat = [(list_new_messages(one.request, one.parent), one.text) for one in path]
        transcript.messages = [
            message for new, text in chat for message in (*new, Message(role="assistant", content=text))
        ]
        transcript.num_prompt_messages = len(chat[0][0])
        rewards = sum(answer.reward or 0.0 for answer in session.answers)
        transcript.score = replace(score, reward=score.reward + rewards)
    if score.outcome is Outcome.ENVIRONMENT_FAILED or (session.overflow and end is EpisodeEnd.TOKEN_LIMIT):
        transcript.failure = score.reason
    return transcript


@asynccontextmanager
async def open_agent_proposers(
    config: EvolvingConfig, caller: RoleModelCaller, engines: Mapping[str, EngineClient], score: ScoreFn
) -> AsyncIterator[dict[str, AgentProposer]]:
    """Context manager that starts a proposer for each model that proposes, by model name."""
    role, data = config.roles.proposer, config.data
    max_tokens = role.max_tokens or data.max_response_length
    env = config.env.model_copy(update={"max_tokens_per_turn": max_tokens})

    async def grade(prompt: Prompt, text: str, turns: Sequence[Turn]) -> Score:
        return await score(prompt, text)

    async with AsyncExitStack() as stack:
        proposers = {}
        for name in config.proposer_models:
            client, model = engines[name], config.models[name]
            price = compute_call_price(model, data.max_length - max_tokens, max_tokens)
            around = partial(log_request, caller, name, Usage(1, data.max_length, price))
            opened = open_agent_runner(client.engine, env, data, grade if env.agent.grade else None, around)
            runner = await stack.enter_async_context(opened)
            ids, stop = client.stop_token_ids, client.rollout.stop_strings
            sampling = Sampling(data.max_length, role.temperature, role.top_p, stop_token_ids=ids, stop=stop)
            proposers[name] = AgentProposer(caller, runner, sampling, model.max_concurrent)
        yield proposers


async def log_request(
    caller: RoleModelCaller, model: str, max_usage: Usage, request: Request, answer: Callable[[], Awaitable[None]]
) -> None:
    """Answer a request of a program as soon as it fits the budget, and log it as a call. An end of the run ends the
    session."""

    async def generate() -> ModelReply:
        await answer()
        if not request.answers:
            raise ModelCallError(request.session.overflow or "the request got no answer")
        completions = [one.completion for one in request.answers]
        text = "\n\n".join(one.text for one in request.answers)
        tokens = sum(len(one.token_ids) for one in completions)
        return ModelReply(text, request.seed, len(request.prompt_ids), tokens, completions[-1].stop_reason.value)

    key = f"{request.session.name}turn{request.session.num_started - 1}"
    call = ModelCall(key, "proposer", model, request.body_digest, seed=0, ended_at=0.0, seconds=0.0)
    try:
        await caller.log_call(call, max_usage, generate)
    except ModelCallError:
        pass  # the program has received the error
    except (EvolutionStopped, OSError) as error:
        request.record_engine_error(error)
        raise EngineError(str(error)) from error


def _make_no_environment(turns: Sequence[Turn]) -> Never:
    raise AssertionError("an agent has no environment")
