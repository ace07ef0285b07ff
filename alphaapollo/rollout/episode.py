"""Run episodes: an environment and an engine take turns. The episodes of one prompt run concurrently, each in its own
environment.

    reset -> context_0 -> [engine] -> action_0 -> [environment] -> context_1 -> [engine] -> action_1 -> ... -> score

The model's tokens are decoded for the environment and never re-encoded for training. token_context.py builds the
engine's prompts. This module applies all limits and timeouts, so environments do not need their own."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Thread
from typing import Any

from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineError
from alphaapollo.environments.base import Environment, EnvironmentFailure, wrap_environment_errors
from alphaapollo.environments.memory import Step
from alphaapollo.processes.time_limit import TimeLimit, exclude_from_time_limit
from alphaapollo.rewards.completion_group import CompletionGroup
from alphaapollo.rollout.environment_replies import check_reset_reply, check_score, check_step_reply
from alphaapollo.rollout.token_context import (
    AppendContext,
    PromptTooLong,
    build_append_context_rows,
    check_rows_match_turns,
)
from alphaapollo.types import (
    DERIVED,
    EpisodeEnd,
    GroupRequest,
    ImageInput,
    Message,
    Outcome,
    Prompt,
    Row,
    Sampling,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.kept_tokens import KEPT_TOKENS
from alphaapollo.utils.seeds import derive_seed
from alphaapollo.utils.text import cut_at_stop
from alphaapollo.utils.thoughts import Marks

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2  # per episode: a failing environment is retried once
CLOSE_SECONDS = 30.0  # timeout of an environment's close()
MAX_THREADS = 64  # sync calls of environments at a time


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode, besides its token budget `sampling.max_tokens`."""

    max_turns: int
    environment_seconds: float  # time in the environment over all turns, without generation and waiting
    max_tokens_per_turn: int | None = None  # None: the remaining token budget of the episode
    reward: float | None = None  # reward of an episode that a limit ends (env.limit_reward); None: see score_limit


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """An episode to run: prompt, environment, sampling parameters and random seeds."""

    prompt: Prompt
    sample_index: int  # among the episodes of the prompt
    make_environment: Callable[[Sequence[Turn]], Environment]  # gets the list to which each turn is appended
    sampling: Sampling  # max_tokens is the budget of the episode; in append context it includes observations
    derive_turn_seed: Callable[[int], int]  # turn number -> seed
    name: str  # unique among the running episodes


class EnvironmentCaller:
    """Calls environment methods, which are user code: async methods on this event loop, at most `max_threads` sync
    methods at a time in threads. Exceptions become EnvironmentFailure with a reason."""

    def __init__(self, max_threads: int = MAX_THREADS):
        self._slots = asyncio.Semaphore(max_threads)

    async def call(self, time_limit: TimeLimit, environment: Environment, method_name: str, *arguments: object) -> Any:
        """Call a method of an environment. Raises EnvironmentFailure if it fails, TimeoutError after the time limit."""
        async with time_limit.count_time():
            with (
                HEARTBEAT.record_call(f"environment.{method_name}", timeout=time_limit.seconds_left),
                wrap_environment_errors(f"{type(environment).__qualname__}.{method_name}"),
            ):
                method = getattr(environment, method_name)
                try:
                    if inspect.iscoroutinefunction(method):
                        return await method(*arguments)
                    result = await self._run_in_thread(method, *arguments)
                    return await result if inspect.isawaitable(result) else result
                except SystemExit as error:  # an environment must not end the run
                    raise RuntimeError(f"the environment called exit ({error}). Raise an exception instead.") from error

    async def close(self, environment: Environment) -> None:
        """Close an environment. Failures are logged; they do not change the episode's result."""
        try:
            await self.call(TimeLimit(CLOSE_SECONDS), environment, "close")
        except (EnvironmentFailure, TimeoutError) as error:
            logger.warning("an environment's close() failed: %r", error)

    async def _run_in_thread(self, method: Callable[..., object], *arguments: object) -> object:
        """Run a method in a new daemon thread, which a cancelled call abandons. In a thread pool, each hanging
        environment would block one thread and keep the process from exiting."""
        outcome: Future[tuple[object, BaseException | None]] = Future()
        outcome.set_running_or_notify_cancel()

        def run_method() -> None:
            try:
                outcome.set_result((method(*arguments), None))
            except BaseException as error:  # noqa: BLE001  the caller raises it
                outcome.set_result((None, error))

        with exclude_from_time_limit():
            await self._slots.acquire()
        try:
            Thread(target=run_method, daemon=True).start()
            result, error = await asyncio.wrap_future(outcome)
        finally:
            self._slots.release()
        if error is not None:
            raise error
        return result


@dataclass(slots=True)
class _EpisodeAttempt:
    """Data of one attempt to run an episode. They remain available if the attempt fails."""

    turns: list[Turn] = field(default_factory=list)
    engine_prompts: list[list[int]] = field(default_factory=list)  # one per turn
    engine_images: list[tuple[ImageInput, ...]] = field(default_factory=list)  # one per turn
    score: Score | None = None
    too_long_reason: str = ""  # error if a later prompt than the first is too long, perhaps because of the policy
    first_observation: list[Message] | str | None = None
    build_rows: Callable[[Sequence[Turn]], list[Row]] = build_append_context_rows


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Runs episodes on one engine. If a limit ends an episode before the model's answer, `grade`, the reward function,
    grades an empty answer."""

    engine: Engine
    decode: Callable[[Sequence[int]], str]
    make_token_context: Callable[[Environment, Prompt], AppendContext]
    limits: EpisodeLimits
    grade: Callable[[Prompt, str, Sequence[Turn]], Awaitable[Score]] | None = None
    environment_caller: EnvironmentCaller = field(default_factory=EnvironmentCaller)
    decode_raw: Callable[[Sequence[int]], str] | None = None  # decodes tokens with special tokens, for display
    find_marks: Callable[[Sequence[int], Sequence[int]], Marks] = lambda prompt_ids, token_ids: ()
    placeholder_id: int | None = None  # placeholder token of images; None: a text model
    system_prompt: str = ""  # data.system_prompt, for first observations without a system message

    async def run(self, task: EpisodeTask) -> Trajectory:
        """Run one episode and return its trajectory.

        If the environment fails, the episode is retried once in a new environment. After a second failure it ends with
        ENVIRONMENT_FAILED: it is excluded from training instead of scored 0. Timeouts and prompts over the length limit
        are not retried. Raises EngineError if the engine fails."""
        with (
            HEARTBEAT.use_track(lane=task.name),
            HEARTBEAT.record_call("episode", prompt=task.prompt.id, sample=task.sample_index),
        ):
            started, time_limit = time.perf_counter(), TimeLimit(self.limits.environment_seconds)
            for number in range(1, MAX_ATTEMPTS + 1):
                attempt = _EpisodeAttempt()
                try:
                    end = await self._run_attempt(task, attempt, time_limit)
                    score = attempt.score or await self._score_episode_without_answer(task.prompt, end, attempt)
                    break
                except TimeoutError:
                    limit = f"env.episode_timeout={self.limits.environment_seconds:g} s"
                    end = EpisodeEnd.TIME_LIMIT
                    score = make_failure_score(f"{limit} was exceeded in turn {len(attempt.turns)}")
                    break
                except PromptTooLong as failure:  # the first prompt; _run_turns handles later ones
                    end, score = EpisodeEnd.PROMPT_LIMIT, make_failure_score(str(failure))
                    break
                except EnvironmentFailure as failure:
                    end = EpisodeEnd.ENVIRONMENT_FAILED
                    score = make_failure_score(f"{failure} (attempt {number} of {MAX_ATTEMPTS})")
            rows = attempt.build_rows(attempt.turns)
            check_rows_match_turns(
                rows, attempt.turns, attempt.engine_prompts, attempt.engine_images, self.placeholder_id
            )
            for turn in attempt.turns:
                turn.completion = replace(turn.completion, columns={})  # the rows contain the columns
            seconds = time.perf_counter() - started
            return Trajectory(
                task.prompt.id, task.sample_index, attempt.turns, rows, score, end, seconds, attempt.first_observation
            )

    async def _run_attempt(self, task: EpisodeTask, attempt: _EpisodeAttempt, time_limit: TimeLimit) -> EpisodeEnd:
        with wrap_environment_errors("creating the environment"):
            environment = task.make_environment(attempt.turns)
        try:
            call = partial(self.environment_caller.call, time_limit, environment)
            context = self.make_token_context(environment, task.prompt)
            attempt.build_rows = context.build_rows
            first_observation = check_reset_reply(await call("reset", task.prompt), self.system_prompt)
            context.start_episode(first_observation)
            attempt.first_observation = first_observation
            end = await self._run_turns(task, attempt, context, partial(call, "step"))
            environment_scores_limit = self.limits.reward is None and hasattr(environment, "score_at_limit")
            if attempt.score is None and end is not EpisodeEnd.DONE and environment_scores_limit:
                attempt.score = mark_limit(check_score(await call("score_at_limit"), "score_at_limit"))
            return end
        finally:
            await self.environment_caller.close(environment)

    async def _run_turns(
        self,
        task: EpisodeTask,
        attempt: _EpisodeAttempt,
        context: AppendContext,
        call: Callable[[str], Awaitable[object]],
    ) -> EpisodeEnd:
        budget, context_ids, context_images = task.sampling.max_tokens, context.prompt_ids, context.prompt_images
        while True:
            number = len(attempt.turns)
            limit = min(budget, self.limits.max_tokens_per_turn or budget)
            sampling = replace(task.sampling, max_tokens=limit, seed=task.derive_turn_seed(number))
            with HEARTBEAT.record_call("generate", turn=number, shown=len(context.prompt_ids)):
                request_id = f"{task.name}.{number}"
                completion = await self.engine.generate(context.prompt_ids, sampling, request_id, context.prompt_images)
            text = cut_at_stop(self.decode(completion.token_ids), sampling.stop, sampling.includes_stop)
            turn = Turn(context_ids, completion, text, context_images=context_images)
            turn.marks = self.find_marks(context.prompt_ids, completion.token_ids)
            if completion.stop_reason is StopReason.LENGTH and self.decode_raw:
                turn.raw_text = self.decode_raw(completion.token_ids)
            attempt.turns.append(turn)
            attempt.engine_prompts.append(context.prompt_ids)
            attempt.engine_images.append(context.prompt_images)

            result = check_step_reply(await call(turn.text))
            turn.reward, turn.valid, turn.info = result.reward, result.valid, result.info
            turn.observation = result.observation.messages if result.observation else None
            if result.kept_chars is not None:
                self._truncate_turn(turn, result.kept_chars)
            attempt.score = result.score
            budget -= len(turn.completion.token_ids)
            if result.done:
                is_truncated = turn.completion.stop_reason is StopReason.LENGTH  # by the limit of turn or episode
                return EpisodeEnd.TOKEN_LIMIT if is_truncated else EpisodeEnd.DONE
            if budget <= 0:
                return EpisodeEnd.TOKEN_LIMIT
            if number + 1 >= self.limits.max_turns:
                return EpisodeEnd.TURN_LIMIT
            assert result.observation is not None
            step = Step(turn.text, result.observation.messages, result.reward)
            try:
                context_ids, context_images = context.add_turn_and_get_context(turn.completion.token_ids, step)
            except PromptTooLong as failure:
                attempt.too_long_reason = str(failure)
                return EpisodeEnd.TOKEN_LIMIT
            budget -= len(context_ids) if context.uses_budget else 0
            if budget <= 0:
                return EpisodeEnd.TOKEN_LIMIT

    async def _score_episode_without_answer(self, prompt: Prompt, end: EpisodeEnd, attempt: _EpisodeAttempt) -> Score:
        if end is EpisodeEnd.DONE:
            return Score(0.0, reason="the environment returned no score")
        score = await score_limit(self.limits.reward, self.grade and partial(self.grade, prompt, "", attempt.turns))
        reasons = [f"no answer before the {end.replace('_', ' ')}", attempt.too_long_reason, score.reason]
        return replace(score, reason=": ".join(filter(None, reasons)))

    def _truncate_turn(self, turn: Turn, kept_chars: int) -> None:
        """Truncate a turn's tokens to the shortest prefix that decodes to at least `kept_chars` characters."""
        if kept_chars >= len(turn.text):
            return
        ids = turn.completion.token_ids
        count = bisect_left(range(len(ids)), max(kept_chars, 1), key=lambda i: len(self.decode(ids[: i + 1]))) + 1
        turn.completion = replace(
            turn.completion,
            token_ids=ids[:count],
            logprobs=turn.completion.logprobs[:count],
            stop_reason=StopReason.STOP,
        )
        turn.text, turn.raw_text = self.decode(ids[:count]), ""


async def score_limit(reward: float | None, grade_empty_answer: Callable[[], Awaitable[Score]] | None) -> Score:
    """Return the score of an episode that reached a limit without an answer: env.limit_reward, or else the grade of an
    empty answer, or 0 without a grader."""
    if reward is not None:
        return Score(reward, {"accuracy": 0.0}, is_limit=True)
    return mark_limit(Score(0.0) if grade_empty_answer is None else await grade_empty_answer())


def mark_limit(score: Score) -> Score:
    """Mark a score as that of an episode that a limit ended. An unknown accuracy is then derived from the components
    (see Score), unless the score is already marked."""
    accuracy = DERIVED if score.accuracy is None else score.accuracy
    return score if score.is_limit else replace(score, is_limit=True, accuracy=accuracy)


def make_failure_score(reason: str) -> Score:
    """Return the score of an episode whose environment failed: it is excluded from training."""
    return Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason=reason)


async def run_group(
    request: GroupRequest,
    run_episode: Callable[[EpisodeTask], Awaitable[Trajectory]],
    make_environment: Callable[[Sequence[Turn]], Environment],
) -> TrajectoryGroup:
    """Run the episodes of a group, and a greedy episode (ReMax) if requested. Returns the trajectories in sample order.
    If an episode raises, e.g. because the engine died, all other episodes of the group are cancelled."""
    purpose = "validate" if request.validate else "rollout"
    prompt, sampling, position = request.prompt, request.sampling, request.stream_position

    def make_episode_task(sample_index: int, sampling: Sampling) -> EpisodeTask:
        return EpisodeTask(
            prompt,
            sample_index,
            make_environment,
            sampling=sampling,
            derive_turn_seed=partial(derive_seed, sampling.seed, purpose, position, prompt.id, sample_index),
            name=f"{purpose}.{position}.{prompt.id}.{sample_index}",
        )

    tasks = [make_episode_task(sample, sampling) for sample in range(request.num_samples)]
    completions = CompletionGroup(len(tasks))
    episodes = [asyncio.ensure_future(completions.run(run_episode, task)) for task in tasks]
    if request.greedy_baseline:
        tasks.append(
            make_episode_task(request.num_samples, replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0))
        )
        episodes.append(asyncio.ensure_future(run_episode(tasks[-1])))
    try:
        trajectories = await asyncio.gather(*episodes)
        for task, trajectory in zip(tasks, trajectories, strict=True):
            for row in trajectory.rows:
                row.temperature = task.sampling.temperature
        baseline = trajectories.pop() if request.greedy_baseline else None
        untrained = [*trajectories] if request.validate else []
        untrained += [baseline] if baseline else []
        needs_kept = sampling.returns_kept_tokens and sampling.temperature > 0
        rows = [row for trajectory in trajectories for row in trajectory.rows if needs_kept]
        if not all(KEPT_TOKENS in row.columns for row in rows):
            raise EngineError("the engine returned no kept tokens. Set rollout.sampling_mask=False, and report this.")
        for trajectory in untrained:
            for row in trajectory.rows:
                row.columns = {}  # only training uses them
        return TrajectoryGroup(prompt, trajectories, baseline)
    finally:
        for episode in episodes:
            episode.cancel()
