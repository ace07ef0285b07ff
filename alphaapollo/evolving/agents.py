"""Proposers that are programs of the user (env.env_name=agent).

A program runs in a session of its own for each candidate. Each of its requests is a call of the proposer's model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Never

from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.engines.protocol import EngineError
from alphaapollo.environments.base import ScoreFn
from alphaapollo.evolving.calls import EvolutionStopped, RoleCaller, Transcript
from alphaapollo.evolving.model_clients import EngineClient, ModelCallError
from alphaapollo.evolving.pool import ModelCall
from alphaapollo.evolving.roles import ModelReply, make_user_chat
from alphaapollo.rollout.agents.rows import list_new_messages
from alphaapollo.rollout.agents.runner import AgentRunner, open_agent_runner
from alphaapollo.rollout.agents.session import AgentSession, Request
from alphaapollo.rollout.check_replies import check_messages
from alphaapollo.rollout.episode import EpisodeTask
from alphaapollo.types import EpisodeEnd, Message, Outcome, Prompt, Sampling, Score, Turn


@dataclass(frozen=True)
class AgentProposer:
    """Proposer that runs the program with one model. At most models.NAME.max_concurrent programs run at once."""

    caller: RoleCaller
    runner: AgentRunner
    sampling: Sampling
    slots: asyncio.Semaphore

    async def propose(
        self, prompt: Prompt, key: str, index: int, build_prompt: Callable[[list[Message]], list[Message]]
    ) -> Transcript:
        """Run the program with the proposer's prompt as the content of its task. Raises like `call_model`.
        key: prefix of the keys of its calls. index: of the solution."""
        first = make_user_chat(prompt.content) if isinstance(prompt.content, str) else list(prompt.content)
        messages = check_messages(build_prompt(first), "proposer.build")

        def make_no_environment(turns: Sequence[Turn]) -> Never:
            raise AssertionError("an agent has no environment")

        task = EpisodeTask(
            replace(prompt, content=messages),
            index,
            make_no_environment,
            self.sampling,
            lambda number: self.caller.derive_call_seed(f"{key}turn{number}"),
            name=key,
        )
        async with self.slots:
            session, end, score = await self.runner.run_session(task)
        return make_transcript(messages, session, end, score)


def make_transcript(prompt: list[Message], session: AgentSession, end: EpisodeEnd, score: Score) -> Transcript:
    """Make the transcript of a session: the chat that ends with its last answer. prompt: used if there is no answer."""
    transcript = Transcript(prompt, len(prompt), score=score)
    if session.answers:
        path = session.answers[-1].path
        chat = [(list_new_messages(one.request, one.parent), one.sampled.text) for one in path]
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
    config: EvolvingConfig, caller: RoleCaller, engines: Mapping[str, EngineClient], score: ScoreFn
) -> AsyncIterator[dict[str, AgentProposer]]:
    """Context manager that starts a proposer for each model that proposes, by model name."""
    role, data, proposers = config.roles.proposer, config.data, dict[str, AgentProposer]()
    max_tokens = role.max_tokens or data.max_response_length
    env = config.env.model_copy(update={"max_tokens_per_turn": max_tokens})

    async def grade(prompt: Prompt, text: str, turns: Sequence[Turn]) -> Score:
        return await score(prompt, text)

    async with AsyncExitStack() as stack:
        for name in config.proposer_models:
            client = engines[name]
            around = partial(log_request, caller, name, data.max_length, max_tokens)
            opened = open_agent_runner(client.engine, env, data, grade if env.agent.grade else None, around)
            runner = await stack.enter_async_context(opened)
            ids, stop = client.stop_token_ids, client.rollout.stop_strings
            sampling = Sampling(data.max_length, role.temperature, role.top_p, stop_token_ids=ids, stop=stop)
            slots = asyncio.Semaphore(config.models[name].max_concurrent)
            proposers[name] = AgentProposer(caller, runner, sampling, slots)
        yield proposers


async def log_request(
    caller: RoleCaller,
    model: str,
    max_length: int,
    max_tokens: int,
    request: Request,
    answer: Callable[[], Awaitable[None]],
) -> None:
    """Answer a request of a program as soon as it fits the budget, and log it as a call. An end of the run ends the
    session."""

    async def generate() -> ModelReply:
        await answer()
        if not request.answers:
            raise ModelCallError(request.session.overflow or "the request got no answer")
        completions = [one.sampled.completion for one in request.answers]
        text = "\n\n".join(one.sampled.text for one in request.answers)
        tokens = sum(len(one.token_ids) for one in completions)
        return ModelReply(text, request.seed, len(request.prompt_ids), tokens, completions[-1].stop_reason.value)

    key = f"{request.session.name}turn{request.session.num_started - 1}"
    call = ModelCall(key, "proposer", model, request.body_digest, seed=0)
    try:
        await caller.log_call(call, max_length - max_tokens, max_tokens, generate)
    except ModelCallError:
        pass  # the program has received the error
    except (EvolutionStopped, OSError) as error:
        request.record_engine_error(error)
        raise EngineError(str(error)) from error
