"""Run one episode of an agent: a session in which the user's program calls the policy.

    task -> program <-> endpoint <-> engine -> reward of the program, and graded text -> Trajectory

A path of the session's forest (engines/agent_sessions.py) is one token sequence. The longest path from a root is one
row. Each remaining branch is a row of its own, in which the tokens that it shares with another row are context. So each
sampled token is trained on once, after exactly the tokens that the engine received."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

from alphaapollo.config.schema import Agent, Data, Env, GenerationData
from alphaapollo.engines.agent_sessions import AgentSession, Answer, SessionLimits, list_new_messages
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import MODEL_NAME
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rewards.base import convert_to_float, convert_to_score
from alphaapollo.rewards.openai_connection import make_openai_message
from alphaapollo.rollout.agents.endpoint import AroundRequest, SessionGate, answer_request, open_endpoint
from alphaapollo.rollout.agents.programs import ProgramResult, ProgramRunner
from alphaapollo.rollout.episode import MAX_ATTEMPTS, EpisodeTask, make_failure_score, score_limit
from alphaapollo.rollout.token_context import build_row, check_rows_match_turns
from alphaapollo.types import EpisodeEnd, ImageInput, Prompt, Row, Score, Trajectory, Turn
from alphaapollo.utils.heartbeat import HEARTBEAT

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
    """Runs episodes of an agent on one engine. grade: the reward function, with env.agent.grade."""

    agent: Agent
    endpoint: SessionGate
    programs: ProgramRunner
    limits: SessionLimits
    grade: Grade | None = None

    async def run(self, task: EpisodeTask) -> Trajectory:
        """Run one episode and return its trajectory.

        A program that fails or returns no reward is run once more in a new session, unless a limit of the session
        ended its last request: then the episode is scored like others at the limit. After a second failure, or if the
        program exceeds env.agent.timeout, the trajectory has no reward and is excluded from training. Raises
        EngineError if the engine fails."""
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
            messages = list_new_messages(session.requests[0], None) if session.requests else None
            return Trajectory(task.prompt.id, task.sample_index, turns, rows, score, end, seconds, messages)

    async def run_session(self, task: EpisodeTask) -> tuple[AgentSession, EpisodeEnd, Score]:
        """Run the program, twice if it fails. Returns the last session, how the episode ended, and its score."""
        time_limit = TimeLimit(self.agent.timeout)
        for number in range(1, MAX_ATTEMPTS + 1):
            session = AgentSession(task.sampling, task.derive_turn_seed, self.limits, task.name)
            try:
                result = await self.run_program(task.prompt, task.sample_index, session, time_limit)
            except TimeoutError:
                reason = f"the program took longer than env.agent.timeout={self.agent.timeout:g} s"
                return session, EpisodeEnd.TIME_LIMIT, make_failure_score(reason + _describe_refusals(session))
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
        with self.endpoint.open_session(session, time_limit):
            async with time_limit.count_time():
                with HEARTBEAT.record_call("program", timeout=time_limit.seconds_left):
                    running = asyncio.ensure_future(self.programs.run(inputs, variables))
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
        """Return how the episode ended, and its score. The first of these cases applies:

        1. the program's result is invalid: failure
        2. the prompt is too long for a first answer: failure
        3. a limit stopped the program: env.limit_reward, or else the grade of an empty answer
        4. the program failed, or got no answer: failure
        5. otherwise: the program's reward plus the grade; failure if there is neither
        """
        answers, failed_end = session.answers, EpisodeEnd.ENVIRONMENT_FAILED
        refusals, session.error = _describe_refusals(session), result.error.partition("\n")[0]
        try:
            score = _read_result(session, result)
        except (TypeError, ValueError) as error:
            return failed_end, make_failure_score(f"the program's result is no reward: {error}")
        if session.prompt_error and result.error and not answers:
            return EpisodeEnd.PROMPT_LIMIT, make_failure_score(session.prompt_error)
        ends_with_truncation = bool(answers) and answers[-1].is_truncated and not session.is_refused
        truncation = "a limit of tokens cut the last answer" if ends_with_truncation else ""
        if result.error and (limit := session.prompt_error or truncation or session.reached_limit):
            # score_limit needs the grade of an empty answer
            grade = None if self.grade is None else partial(self._grade, prompt, session, "")
            score = await score_limit(session.limits.reward, grade)
            end = EpisodeEnd.TURN_LIMIT if limit == session.reached_limit else EpisodeEnd.TOKEN_LIMIT
            return end, replace(score, reason=f"no answer before the limit: {limit}; {session.error}{refusals}")
        if result.error:
            return failed_end, make_failure_score(f"the program failed: {result.error}{refusals}")
        if not answers:
            return failed_end, make_failure_score(f"the program got no answer from the policy{refusals}")
        if self.grade is not None:
            graded = await self._grade(prompt, session, answers[-1].text)
            if score is not None and not graded.outcome.failed:  # the reward is the sum of both
                parts = {**graded.components, **score.components, "agent": score.reward}
                accuracy = parts.get("accuracy") if graded.accuracy is None else graded.accuracy
                graded = replace(graded, reward=graded.reward + score.reward, components=parts, accuracy=accuracy)
            score = graded
        if score is None and all(answer.reward is None for answer in answers):
            fix = "Return a number or a dict of numbers, or set env.agent.grade=true."
            return failed_end, make_failure_score(f"the program returned no reward. {fix}")
        end = EpisodeEnd.TURN_LIMIT if session.reached_limit else EpisodeEnd.DONE
        if answers[-1].is_truncated:
            end = EpisodeEnd.TOKEN_LIMIT
        return end, score or Score(0.0)

    async def _grade(self, prompt: Prompt, session: AgentSession, text: str) -> Score:
        assert self.grade is not None
        turns, *_ = build_turns_and_rows(session, "all", ())
        return await self.grade(prompt, text, turns)


@asynccontextmanager
async def open_agent_runner(
    engine: Engine,
    env: Env,
    data: Data | GenerationData,
    grade: Grade | None = None,
    around: AroundRequest = answer_request,
) -> AsyncIterator[AgentRunner]:
    """Context manager that starts the HTTP endpoint of an engine and the process that starts programs. Raises
    ValueError if the user's file cannot be loaded or a parser does not exist."""
    programs = ProgramRunner(env.agent)
    async with open_endpoint(engine, env, data.apply_chat_template_kwargs, data.allow_image_urls, around) as endpoint:
        try:
            await programs.start()
            agent = env.agent
            limits = SessionLimits(data.max_length, agent.max_requests, env.max_tokens_per_turn, env.limit_reward)
            yield AgentRunner(agent, endpoint, programs, limits, grade)
        finally:
            await programs.close()  # before the endpoint, which their requests use


def _describe_refusals(session: AgentSession) -> str:
    """Return how many requests the endpoint refused, and why the first one, as the end of a reason. Empty if none."""
    count = session.num_refused
    return f"; the endpoint refused {count} requests, the first with {session.refusal}" if count else ""


def _read_result(session: AgentSession, result: ProgramResult) -> Score | None:
    """Return the score in a program's result, if it has one, and give the rewards of single answers to the session."""
    for request_id, reward in result.rewards.items():
        session.give_reward(request_id, convert_to_float(reward, "the reward"))
    value = result.value
    if isinstance(value, dict) and "turn_rewards" in value:
        session.give_turn_rewards(value["turn_rewards"])
        value = {name: part for name, part in value.items() if name != "turn_rewards"} or None
    return None if value is None else convert_to_score(value)


TrainedRows = Literal["all", "last", "main"]


def build_turns_and_rows(
    session: AgentSession, trained_rows: TrainedRows, untrained_roles: Sequence[str]
) -> tuple[list[Turn], list[Row], list[list[int]], list[tuple[ImageInput, ...]]]:
    """Return the turns of a session, its rows to train on, and tokens and images of the engine's prompt of each turn.

    The turns of the rows come first, then the turns that are not trained on: those of rows that `trained_rows` excludes
    and those of `untrained_roles`. The rows are in the order of their last answers."""
    branches = find_branches(session.answers)
    if trained_rows == "main":
        branches = branches[:1]
    elif trained_rows == "last":
        branches = [branch for branch in branches if session.answers[-1] in branch]
    chosen = [[answer for answer in branch if answer.request.role not in untrained_roles] for branch in branches]
    turns: list[Turn] = []
    rows: list[Row] = []
    prompts: list[list[int]] = []
    images: list[tuple[ImageInput, ...]] = []
    numbers = {answer: number for number, answer in enumerate(session.answers)}
    for answers in sorted(filter(None, chosen), key=lambda answers: numbers[answers[-1]]):
        first_turn = len(turns)
        num_earlier_ids, num_earlier_images = 0, 0
        for answer in answers:
            context = answer.request.prompt_ids[num_earlier_ids:], answer.request.images[num_earlier_images:]
            turns.append(_make_turn(numbers, answer, *context))
            num_earlier_ids, num_earlier_images = len(answer.token_ids), len(answer.request.images)
        for turn, answer, following in zip(turns[first_turn:], answers, answers[1:], strict=False):
            turn.observation = list_new_messages(following.request, answer)
        first = answers[0]
        num_earlier_tokens = len(first.request.prompt_ids) - len(first.path[0].request.prompt_ids)
        rows.append(build_row(turns[first_turn:], first_turn, num_earlier_tokens))
        prompts += [answer.request.prompt_ids for answer in answers]
        images += [answer.request.images for answer in answers]
    trained_numbers = {turn.answer_number for turn in turns}
    for answer, number in numbers.items():
        if number not in trained_numbers:
            turns.append(_make_turn(numbers, answer, answer.request.prompt_ids, answer.request.images))
    for turn in turns:
        turn.completion = replace(turn.completion, columns={})  # the rows contain the columns
    return turns, rows, prompts, images


def find_branches(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Split a forest into paths: the longest path from the first root, then the branches off it, and so on. A branch
    begins with its first answer that is in no earlier path."""
    children: dict[Answer | None, list[Answer]] = defaultdict(list)
    for answer in answers:
        children[answer.parent].append(answer)
    depth: dict[Answer, int] = {}
    for answer in reversed(answers):  # a child comes after its parent, so its depth is known first
        depth[answer] = 1 + max((depth[child] for child in children[answer]), default=0)
    branches: list[list[Answer]] = []
    waiting = list(children[None])
    while waiting:
        branch, options = [], [waiting.pop(0)]
        while options:
            longest = max(options, key=lambda answer: depth[answer])  # the first of equally long ones
            waiting += [answer for answer in options if answer is not longest]
            branch.append(longest)
            options = children[longest]
        branches.append(branch)
    return branches


def _make_turn(
    numbers: Mapping[Answer, int], answer: Answer, context_ids: list[int], images: tuple[ImageInput, ...]
) -> Turn:
    """Build the turn of an answer. numbers: position of each answer in the session."""
    request, parent, number = answer.request, answer.parent, numbers[answer]
    session, is_last = request.session, number == len(numbers) - 1
    info = {
        "request": request.id,
        "role": request.role,
        "difference": request.difference,
        "reused_tokens": len(parent.token_ids) if parent else 0,
        "constrained": request.is_constrained,
        "last_answer": is_last,
        "refused": session.num_refused if is_last else 0,
        "error": session.error if is_last else "",
    }
    info = {name: value for name, value in info.items() if value}
    reward = answer.reward or 0.0
    turn = Turn(context_ids, answer.completion, answer.text, reward, info=info, context_images=images)
    turn.answer_number, turn.marks = number, answer.marks
    return turn
