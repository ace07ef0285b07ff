"""One episode: an environment and an engine take turns.

    reset -> context_0 -> [engine] -> action_0 -> [environment] -> context_1 -> [engine] -> action_1 -> ... -> score

Tokens in, tokens out: every observation is rendered to tokens once and appended; the model's tokens are decoded for
the environment and never encoded again. This file owns tokens, limits and time-outs; environments know none of them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from alphaapollo.environments.base import Environment, Observation, StepResult
from alphaapollo.rollout.engine import Engine
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

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # a failing environment is tried again once
CLOSE_SECONDS = 30.0


class Renderer(Protocol):
    """Messages to tokens and back: data.rendering.Renderer."""

    def prompt_ids(self, content: list[Message] | str) -> list[int]: ...

    def delta_ids(self, messages: list[Message], last_token: int | None = None) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What one episode may take, besides its `sampling.max_tokens`."""

    max_turns: int
    seconds: float  # wall time, over all turns


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """One episode to play: which sample of which prompt, and its randomness."""

    prompt: Prompt
    sample: int
    make_environment: Callable[[], Environment]
    sampling: Sampling  # max_tokens: everything after the prompt, what the environment adds between actions included
    seed_of_turn: Callable[[int], int]
    name: str  # unique among the episodes in flight


class EnvironmentFailure(Exception):
    """The environment raised, or returned what it must not."""


@dataclass(slots=True)
class _Attempt:
    """What one attempt has so far; it survives being cut short."""

    turns: list[Turn] = field(default_factory=list)
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Plays episodes. `render_prompt` makes the first observation's tokens (see rollout.prompts)."""

    engine: Engine
    renderer: Renderer
    render_prompt: Callable[[list[Message] | str], list[int]]
    limits: EpisodeLimits

    async def run(self, task: EpisodeTask) -> Trajectory:
        """Play one episode.

        A failing environment is replaced and the episode played once more from its start, then given up as
        ENVIRONMENT_FAILED: masked, never scored 0. Passing the time limit is such a failure without a second try, for
        who was slow is not known. An engine's error and a prompt that is too long are not the environment's: they
        leave here.
        """
        started = time.perf_counter()
        for number in range(1, ATTEMPTS + 1):
            attempt = _Attempt()
            try:
                async with asyncio.timeout(self.limits.seconds - (time.perf_counter() - started)):
                    end = await self._play(task, attempt)
                score = attempt.score or Score(0.0, reason=f"no score before the {end.replace('_', ' ')}")
                break
            except TimeoutError:
                end = EpisodeEnd.TIME_LIMIT
                score = _failed(f"env.episode_timeout: {self.limits.seconds:g} s passed in turn {len(attempt.turns)}")
                break
            except EnvironmentFailure as failure:
                end, score = EpisodeEnd.ENVIRONMENT_FAILED, _failed(f"{failure} (attempt {number} of {ATTEMPTS})")
        rows = append_context_rows(attempt.turns)
        seconds = time.perf_counter() - started
        return Trajectory(task.prompt.id, task.sample, attempt.turns, rows, score, end, seconds)

    async def _play(self, task: EpisodeTask, attempt: _Attempt) -> EpisodeEnd:
        with _blaming("making the environment"):
            environment = task.make_environment()
        try:
            observation = await _call(environment.reset, task.prompt)
            context = self.render_prompt(_content(observation))
            return await self._take_turns(task, attempt, environment, context)
        finally:
            await _close(environment)

    async def _take_turns(
        self, task: EpisodeTask, attempt: _Attempt, environment: Environment, context: list[int]
    ) -> EpisodeEnd:
        history: list[int] = []
        budget = task.sampling.max_tokens
        while True:
            number = len(attempt.turns)
            history += context
            sampling = replace(task.sampling, max_tokens=budget, seed=task.seed_of_turn(number))
            completion = await self.engine.generate(history, sampling, f"{task.name}.{number}")
            turn = Turn(context, completion, self.renderer.decode(completion.token_ids))
            attempt.turns.append(turn)
            budget -= len(completion.token_ids)

            result = _checked(await _call(environment.step, turn.text))
            turn.reward, turn.valid, turn.info = result.reward, result.valid, result.info
            attempt.score = result.score
            if budget <= 0 and (not result.done or completion.stop_reason is StopReason.LENGTH):
                return EpisodeEnd.TOKEN_LIMIT
            if result.done:
                return EpisodeEnd.DONE
            if number + 1 >= self.limits.max_turns:
                return EpisodeEnd.TURN_LIMIT
            assert result.observation is not None
            context = self.renderer.delta_ids(result.observation.messages, completion.token_ids[-1])
            if len(context) >= budget:
                return EpisodeEnd.TOKEN_LIMIT
            history = history + completion.token_ids
            budget -= len(context)


def append_context_rows(turns: Sequence[Turn]) -> list[Row]:
    """The one row of an append-context trajectory: context_0 + action_0 + context_1 + action_1 + ... (none without
    turns). Actions have mask 1 and the engine's log-probs, contexts 0 and 0.0."""
    if not turns:
        return []
    row = Row(token_ids=[], action_mask=[], logprobs=[], turn_ends=[])
    for turn in turns:
        action = turn.completion
        row.token_ids += turn.context_ids + action.token_ids
        row.action_mask += [0] * len(turn.context_ids) + [1] * len(action.token_ids)
        row.logprobs += [0.0] * len(turn.context_ids) + action.logprobs
        row.turn_ends.append(len(row.token_ids) - 1)
    return [row]


def _failed(reason: str) -> Score:
    return Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason=reason)


def _content(observation: object) -> list[Message] | str:
    if isinstance(observation, Observation):
        return observation.messages
    if isinstance(observation, str):
        return observation
    raise EnvironmentFailure(f"reset returned {type(observation).__name__}; return an Observation or a str")


def _checked(result: object) -> StepResult:
    if not isinstance(result, StepResult):
        raise EnvironmentFailure(f"step returned {type(result).__name__}; return a StepResult")
    if not result.done and result.observation is None:
        raise EnvironmentFailure("step returned neither done nor an observation; return one of them")
    return result


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Whatever environment code raises becomes a failure with a reason."""
    try:
        yield
    except Exception as error:  # environments are the user's code and may raise anything
        raise EnvironmentFailure(f"{what}: {type(error).__name__}: {error}") from error


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call into an environment: async methods on this loop, sync ones in a thread."""
    with _blaming(method.__qualname__):
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        result = await asyncio.to_thread(method, *arguments)
        return await result if inspect.isawaitable(result) else result


async def _close(environment: Environment) -> None:
    """The episode's result stands, whatever comes of closing."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await _call(environment.close)
    except (EnvironmentFailure, TimeoutError) as error:
        logger.warning("an environment did not close: %r", error)
