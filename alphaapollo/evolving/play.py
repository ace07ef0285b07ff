"""An environment and a model take turns, in messages: what a proposer does in the run's environment, and what every
other role does in a Talk, which is a question and perhaps tools.

rollout/episode.py plays the same environments in tokens, for training; here nothing is trained on, so that a model may
be anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from alphaapollo.environments.base import Actions, Answer, Environment, EnvironmentFailure, Observation, StepResult
from alphaapollo.environments.base import blaming as blaming
from alphaapollo.rollout.check_replies import check_first, check_step
from alphaapollo.rollout.environment_calls import call_environment, close_environment
from alphaapollo.rollout.episode import ATTEMPTS
from alphaapollo.rollout.sync_calls import SyncCalls
from alphaapollo.tools.base import Session
from alphaapollo.types import Message, Outcome, Prompt, Score
from alphaapollo.utils.time_limit import Clock

Begin = Callable[[list[Message]], list[Message]]
"""What the environment begins with -> what the model is asked."""
Reply = Callable[[list[Message], int], Awaitable[str]]
"""(the chat so far, the turn) -> what the model says."""


@dataclass(frozen=True)
class Limits:
    """Of one episode."""

    turns: int
    seconds: float  # that its environment takes


@dataclass
class Played:
    """One episode."""

    messages: list[Message] = field(default_factory=list)
    asked: int = 0  # messages that it began with
    score: Score | None = None  # the environment's
    done: bool = False  # the environment ended it, not a limit
    failure: str = ""  # the environment's

    @property
    def text(self) -> str:
        """All that was said after the question."""
        return "\n\n".join(message["content"] for message in self.messages[self.asked :])

    @property
    def last(self) -> str:
        """The model's last words; empty: it said none."""
        said = [message["content"] for message in self.messages[self.asked :] if message["role"] == "assistant"]
        return said[-1] if said else ""


async def play(
    make: Callable[[], Environment],
    prompt: Prompt,
    begin: Begin,
    reply: Reply,
    limits: Limits,
    sync_calls: SyncCalls,
) -> Played:
    """One episode. An environment that fails is replaced once: what the model has said by then is in the pool, and not
    asked again. What `reply` raises leaves here."""
    played = Played()
    for number in range(1, ATTEMPTS + 1):
        played, clock = Played(), Clock(limits.seconds)
        try:
            with blaming("making the environment"):
                environment = make()
            try:
                first = check_first(await call_environment(sync_calls, clock, environment, "reset", prompt))
                asked = [Message(role="user", content=first)] if isinstance(first, str) else list(first)
                played.messages = begin(asked)
                played.asked = len(played.messages)
                await _take_turns(played, environment, clock, reply, limits, sync_calls)
                return played
            finally:
                await close_environment(sync_calls, environment)
        except TimeoutError:
            played.failure = f"env.episode_timeout: {limits.seconds:g} s passed"
            return played
        except EnvironmentFailure as failure:
            played.failure = f"{failure} (attempt {number} of {ATTEMPTS})"
    return played


async def _take_turns(
    played: Played, environment: Environment, clock: Clock, reply: Reply, limits: Limits, sync_calls: SyncCalls
) -> None:
    for turn in range(limits.turns):
        text = await reply(played.messages, turn)
        result = check_step(await call_environment(sync_calls, clock, environment, "step", text))
        text = text if result.kept_chars is None else text[: result.kept_chars]
        played.messages = [*played.messages, Message(role="assistant", content=text)]
        if result.done:
            played.done, played.score = True, result.score
            if result.score and result.score.outcome is Outcome.ENVIRONMENT_FAILED:
                played.failure = result.score.reason
            return
        assert result.observation is not None
        if turn + 1 < limits.turns:
            played.messages = [*played.messages, *result.observation.messages]


class Talk:
    """A question, and tools to answer it with: what calls none is the answer."""

    def __init__(self, messages: Sequence[Message], actions: Actions | None, tools: Sequence[str]):
        self._messages, self._actions = list(messages), actions
        self._tags = [f"<{name}>" for name in tools]
        self._session = Session()

    async def reset(self, prompt: Prompt) -> Observation:
        return Observation(self._messages)

    async def step(self, action: str) -> StepResult:
        if self._actions is None or not any(tag in action for tag in self._tags):
            return StepResult(done=True)
        taken = await self._actions.take(action, self._session)
        return StepResult(done=True, kept_chars=taken.kept_chars) if isinstance(taken, Answer) else taken

    async def close(self) -> None:
        await self._session.close()
