"""Run one episode of an agent: a session in which the user's program calls the policy.

task -> program <-> endpoint <-> engine -> reward of the program, and graded text -> Trajectory
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

from alphaapollo.config.schema import Agent, Data, Env, GenerationData
from alphaapollo.engines.http_api import MODEL_NAME
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rewards.base import convert_to_score
from alphaapollo.rewards.openai_connection import make_openai_message
from alphaapollo.rollout.agents.endpoint import AroundRequest, EndpointServer, HttpEngine, answer_request, open_endpoint
from alphaapollo.rollout.agents.programs import ProgramResult, ProgramRunner
from alphaapollo.rollout.agents.rows import build_turns_and_rows, list_new_messages
from alphaapollo.rollout.agents.session import AgentSession, SessionLimits
from alphaapollo.rollout.context import check_rows_match_turns
from alphaapollo.rollout.episode import MAX_ATTEMPTS, EpisodeTask, make_failure_score, score_limit
from alphaapollo.types import EpisodeEnd, Message, Prompt, Score, Trajectory, Turn
from alphaapollo.utils.heartbeat import HEARTBEAT

logger = logging.getLogger(__name__)

Grade = Callable[[Prompt, str, Sequence[Turn]], Awaitable[Score]]


def make_environment_variables(url: str, token: str, model: str) -> dict[str, str]:
    """Return the environment variables from which clients take the address, the key and the model."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": token,
        "ANTHROPIC_MODEL": model,
    }


@dataclass(frozen=True, slots=True)
class AgentRunner:
    """Runs episodes of an agent on one engine. Has the interface of EpisodeRunner.

    grade: the reward function, with env.agent.grade.
    """

    agent: Agent
    endpoint: EndpointServer
    programs: ProgramRunner
    limits: SessionLimits
    grade: Grade | None = None

    async def run(self, task: EpisodeTask) -> Trajectory:
        """Run one episode and return its trajectory.

        A program that fails or returns no reward is run once more in a new session. After a second failure, or if it
        exceeds env.agent.timeout, the trajectory has no reward and is excluded from training. Raises EngineError if the
        engine fails.
        """
        with (
            HEARTBEAT.use_track(lane=task.name),
            HEARTBEAT.record_call("episode", prompt=task.prompt.id, sample=task.sample_index),
        ):
            started = time.perf_counter()
            session, end, score = await self.run_session(task)
            turns, rows, prompts, images = build_turns_and_rows(session, self.agent.train, self.agent.untrained_roles)
            check_rows_match_turns(rows, turns, prompts, images)
            if not rows and not score.reason:
                score = replace(
                    score, reason="env.agent.train and env.agent.untrained_roles leave no answer to train on"
                )
            seconds = time.perf_counter() - started
            return Trajectory(
                task.prompt.id, task.sample_index, turns, rows, score, end, seconds, _get_first_messages(session)
            )

    async def run_session(self, task: EpisodeTask) -> tuple[AgentSession, EpisodeEnd, Score]:
        """Run the program, twice if it fails. Returns its last session, how it ended, and its score."""
        time_limit = TimeLimit(self.agent.timeout)
        for number in range(1, MAX_ATTEMPTS + 1):
            session = AgentSession(task.sampling, task.derive_turn_seed, self.limits, task.name)
            try:
                result = await self.run_program(task.prompt, task.sample_index, session, time_limit)
            except TimeoutError:
                reason = f"the program took longer than env.agent.timeout={self.agent.timeout:g} s"
                return session, EpisodeEnd.TIME_LIMIT, make_failure_score(reason)
            _warn_of_overridden_sampling(session)
            end, score = await self._score(task.prompt, session, result)
            if end is not EpisodeEnd.ENVIRONMENT_FAILED:
                break
            score = replace(score, reason=f"{score.reason} (attempt {number} of {MAX_ATTEMPTS})")
        return session, end, score

    async def run_program(
        self, prompt: Prompt, sample_index: int, session: AgentSession, time_limit: TimeLimit
    ) -> ProgramResult:
        """Run the program once. Raises TimeoutError at the time limit, and the error of an engine that fails."""
        variables = make_environment_variables(self.endpoint.url, session.token, MODEL_NAME)
        content = prompt.content if isinstance(prompt.content, str) else [*map(make_openai_message, prompt.content)]
        inputs = {**asdict(prompt), "content": content, "sample": sample_index, "seed": session.derive_seed(0)}
        with self.endpoint.gate.open_session(session, time_limit):
            async with time_limit.count_time():
                with HEARTBEAT.record_call("program", timeout=time_limit.seconds_left):
                    running = asyncio.ensure_future(self.programs.run(inputs, variables, session.reward_key))
                    failing = asyncio.ensure_future(session.engine_failed.wait())
                    try:
                        await asyncio.wait((running, failing), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        failing.cancel()
                        if not running.done():
                            running.cancel()
                            await asyncio.wait((running,))
        if session.engine_error is not None:
            raise session.engine_error
        return running.result()

    async def _score(self, prompt: Prompt, session: AgentSession, result: ProgramResult) -> tuple[EpisodeEnd, Score]:
        """Return how the episode ended, and its score."""
        answers, failed = session.answers, EpisodeEnd.ENVIRONMENT_FAILED
        if session.refused_reward:
            return failed, make_failure_score(f"a reward was refused: {session.refused_reward}")
        if session.overflow and result.error and not answers:
            return EpisodeEnd.PROMPT_LIMIT, make_failure_score(session.overflow)
        if result.error and (session.overflow or session.reached_limit):  # as other episodes without an answer
            grade = None if self.grade is None else partial(self._grade, prompt, session, "")
            limit = await score_limit(session.limits.reward, grade)
            end = EpisodeEnd.TOKEN_LIMIT if session.overflow else EpisodeEnd.TURN_LIMIT
            reason = f"no answer before the limit: {session.overflow or session.reached_limit}"
            return end, replace(limit, reason=reason)
        if result.error:
            return failed, make_failure_score(f"the program failed: {result.error}")
        if not answers:
            return failed, make_failure_score("the program made no request to the policy")
        try:
            score = _read_result(session, result.value)
        except (TypeError, ValueError) as error:
            return failed, make_failure_score(f"the program's result is no reward: {error}")
        if self.grade is not None:
            graded = await self._grade(prompt, session, answers[-1].sampled.text)
            if score is not None and not graded.outcome.failed:  # the sum
                parts = {**graded.components, **score.components, "agent": score.reward}
                graded = replace(graded, reward=graded.reward + score.reward, components=parts)
            score = graded
        if score is None and all(answer.reward is None for answer in answers):
            fix = "Return a number or a dict of numbers, or set env.agent.grade=true."
            return failed, make_failure_score(f"the program returned no reward. {fix}")
        end = EpisodeEnd.TURN_LIMIT if session.reached_limit else EpisodeEnd.DONE
        return EpisodeEnd.TOKEN_LIMIT if answers[-1].is_truncated else end, score or Score(0.0)

    async def _grade(self, prompt: Prompt, session: AgentSession, text: str) -> Score:
        assert self.grade is not None
        turns, *_ = build_turns_and_rows(session, "all", ())
        return await self.grade(prompt, text, turns)


@asynccontextmanager
async def open_agent_runner(
    engine: HttpEngine,
    env: Env,
    data: Data | GenerationData,
    grade: Grade | None = None,
    around: AroundRequest = answer_request,
) -> AsyncIterator[AgentRunner]:
    """Context manager that starts the HTTP endpoint of an engine and the process that starts programs.

    around: wraps each request for a completion. Raises ValueError if the user's file cannot be loaded or a parser does
    not exist.
    """
    programs = ProgramRunner(env.agent)
    async with open_endpoint(engine, env, data.apply_chat_template_kwargs, data.allow_image_urls, around) as endpoint:
        try:
            await programs.start()
            agent = env.agent
            limits = SessionLimits(data.max_length, agent.max_requests, env.max_tokens_per_turn, env.limit_reward)
            yield AgentRunner(agent, endpoint, programs, limits, grade)
        finally:
            await programs.close()  # before the endpoint, which their requests use


def _read_result(session: AgentSession, result: object) -> Score | None:
    """Return the score in a program's result, if it has one, and give its `turn_rewards` to the session's answers."""
    if isinstance(result, dict) and "turn_rewards" in result:
        session.give_turn_rewards(result["turn_rewards"])
        result = {name: value for name, value in result.items() if name != "turn_rewards"} or None
    return None if result is None else convert_to_score(result)


def _warn_of_overridden_sampling(session: AgentSession) -> None:
    for name, value in session.overridden.items():
        if name not in _warned:
            _warned.add(name)
            logger.warning(
                "the agent's requests set %s=%s. The policy's own setting is used instead, because training needs it.",
                name,
                value,
            )


_warned: set[str] = set()  # sampling settings with a warning, once per process


def _get_first_messages(session: AgentSession) -> list[Message] | None:
    if not session.requests:
        return None
    return list_new_messages(session.requests[0], None)
