"""One episode: an environment and an engine take turns.

    reset -> context_0 -> [engine] -> action_0 -> [environment] -> context_1 -> [engine] -> action_1 -> ... -> score

Tokens in, tokens out: the model's tokens are decoded for the environment and never encoded again where they are trained
on; how the past is shown is context.py's. This file owns limits and time-outs; environments know none of them.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from alphaapollo.engines.protocol import Engine
from alphaapollo.environments.base import Environment, EnvironmentFailure, blaming
from alphaapollo.environments.memory import Step
from alphaapollo.observability.spans import SPANS
from alphaapollo.rollout.check_replies import check_first, check_step
from alphaapollo.rollout.check_rows import check_rows
from alphaapollo.rollout.context import Context, append_context_rows
from alphaapollo.rollout.environment_calls import call_environment, close_environment
from alphaapollo.rollout.prompts import PromptTooLong
from alphaapollo.rollout.sync_calls import SyncCalls
from alphaapollo.types import (
    EpisodeEnd,
    Message,
    Outcome,
    Prompt,
    Row,
    Sampling,
    Score,
    StopReason,
    Trajectory,
    Turn,
)
from alphaapollo.utils.time_limit import Clock

ATTEMPTS = 2  # a failing environment is tried again once


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What one episode may take, besides its `sampling.max_tokens`."""

    max_turns: int
    seconds: float  # that its environment takes, over all turns; the engine's time is not counted, nor are queues
    tokens_per_turn: int | None = None  # sampled in one turn; None: what is left of the episode's


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """One episode to play: which sample of which prompt, and its randomness."""

    prompt: Prompt
    sample: int
    make_environment: Callable[[Sequence[Turn]], Environment]  # given the turns, to which the episode adds as it goes
    sampling: Sampling  # max_tokens: of the whole episode; in append context what the environment adds counts too
    seed_of_turn: Callable[[int], int]
    name: str  # unique among the episodes in flight


@dataclass(slots=True)
class _Attempt:
    """What one attempt has so far; it survives being cut short."""

    turns: list[Turn] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)  # what the engine was shown, a turn
    score: Score | None = None
    asked: list[Message] | str | None = None
    rows: Callable[[Sequence[Turn]], list[Row]] = append_context_rows


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Plays episodes.

    `make_context` says how an episode's past is shown (see rollout.context). `grade` is the reward function of a graded
    environment: an episode that a limit ends before its answer gets what that says of an empty one.
    """

    engine: Engine
    decode: Callable[[Sequence[int]], str]
    make_context: Callable[[Environment], Context]
    limits: EpisodeLimits
    grade: Callable[[Prompt, str, Sequence[Turn]], Awaitable[Score]] | None = None
    sync_calls: SyncCalls = field(default_factory=SyncCalls)

    async def run(self, task: EpisodeTask) -> Trajectory:
        """Play one episode.

        A failing environment is replaced and the episode played once more from its start, then given up as
        ENVIRONMENT_FAILED: masked, never scored 0. An environment that takes too long is such a failure without a
        second try, and so is a prompt that is too long: it would be so again. An engine's error is not the
        environment's: it leaves here.
        """
        with SPANS.at(lane=task.name), SPANS("episode", prompt=task.prompt.id, sample=task.sample):
            return await self._run(task)

    async def _run(self, task: EpisodeTask) -> Trajectory:
        started, clock = time.perf_counter(), Clock(self.limits.seconds)
        for number in range(1, ATTEMPTS + 1):
            attempt = _Attempt()
            try:
                end = await self._play(task, attempt, clock)
                score = attempt.score or await self._unscored(task.prompt, end, attempt.turns)
                break
            except TimeoutError:
                end = EpisodeEnd.TIME_LIMIT
                score = _failed(f"env.episode_timeout: {self.limits.seconds:g} s passed in turn {len(attempt.turns)}")
                break
            except PromptTooLong as failure:
                end, score = EpisodeEnd.PROMPT_LIMIT, _failed(str(failure))
                break
            except EnvironmentFailure as failure:
                end, score = EpisodeEnd.ENVIRONMENT_FAILED, _failed(f"{failure} (attempt {number} of {ATTEMPTS})")
        rows = attempt.rows(attempt.turns)
        check_rows(rows, attempt.turns, attempt.seen)
        for turn in attempt.turns:  # the rows have them
            turn.completion = replace(turn.completion, routed_experts=None)
        seconds = time.perf_counter() - started
        return Trajectory(task.prompt.id, task.sample, attempt.turns, rows, score, end, seconds, attempt.asked)

    async def _play(self, task: EpisodeTask, attempt: _Attempt, clock: Clock) -> EpisodeEnd:
        with blaming("making the environment"):
            environment = task.make_environment(attempt.turns)
        try:
            context = self.make_context(environment)
            attempt.rows = context.rows
            content = check_first(await call_environment(self.sync_calls, clock, environment, "reset", task.prompt))
            first = context.begin(content)
            attempt.asked = content
            return await self._take_turns(task, attempt, clock, environment, context, first)
        finally:
            await close_environment(self.sync_calls, environment)

    async def _take_turns(
        self,
        task: EpisodeTask,
        attempt: _Attempt,
        clock: Clock,
        environment: Environment,
        context: Context,
        context_ids: list[int],
    ) -> EpisodeEnd:
        budget = task.sampling.max_tokens
        while True:
            number = len(attempt.turns)
            limit = min(budget, self.limits.tokens_per_turn or budget)
            sampling = replace(task.sampling, max_tokens=limit, seed=task.seed_of_turn(number))
            with SPANS("generate", turn=number, shown=len(context.seen)):
                completion = await self.engine.generate(context.seen, sampling, f"{task.name}.{number}")
            turn = Turn(context_ids, completion, self.decode(completion.token_ids))
            attempt.turns.append(turn)
            attempt.seen.append(context.seen)

            result = check_step(await call_environment(self.sync_calls, clock, environment, "step", turn.text))
            turn.reward, turn.valid, turn.info = result.reward, result.valid, result.info
            turn.observation = result.observation.messages if result.observation else None
            if result.kept_chars is not None:
                self._cut(turn, result.kept_chars)
            attempt.score = result.score
            budget -= len(turn.completion.token_ids)
            if result.done:
                was_cut = turn.completion.stop_reason is StopReason.LENGTH  # by either limit
                return EpisodeEnd.TOKEN_LIMIT if was_cut else EpisodeEnd.DONE
            if budget <= 0:
                return EpisodeEnd.TOKEN_LIMIT
            if number + 1 >= self.limits.max_turns:
                return EpisodeEnd.TURN_LIMIT
            assert result.observation is not None
            step = Step(turn.text, result.observation.messages, result.reward)
            context_ids = context.go_on(turn.completion.token_ids, step)
            if context.cost(context_ids) >= budget:
                return EpisodeEnd.TOKEN_LIMIT
            budget -= context.cost(context_ids)

    async def _unscored(self, prompt: Prompt, end: EpisodeEnd, turns: Sequence[Turn]) -> Score:
        """What an episode without a score is worth: 0, or what the reward function says of an empty answer, so that it
        has all named parts of the others' scores."""
        if end is EpisodeEnd.DONE:
            return Score(0.0, reason="the environment gave no score")
        score = Score(0.0) if self.grade is None else await self.grade(prompt, "", turns)
        reason = f"no score before the {end.replace('_', ' ')}"
        return replace(score, reason=f"{reason}: {score.reason}" if score.reason else reason)

    def _cut(self, turn: Turn, kept_chars: int) -> None:
        """Leave the shortest run of sampled tokens whose text has the first `kept_chars` characters."""
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
        turn.text = self.decode(ids[:count])


def _failed(reason: str) -> Score:
    return Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason=reason)
