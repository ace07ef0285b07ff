"""Episodes without a worker. Token ids are small numbers, and text is these numbers separated by spaces."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments import get_environment_spec
from alphaapollo.environments.base import Observation, Services, StepResult
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeRunner, EpisodeTask, run_group
from alphaapollo.rollout.token_context import AppendContext, MemoryContext, PromptRenderer
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling, Score, Trajectory, TrajectoryGroup

STOP = 9
PROMPT = Prompt(3, "exact", "1 2")

Requests = list[tuple[list[int], Sampling]]


def encode(content: list[Message] | str) -> list[int]:
    texts = [content] if isinstance(content, str) else [message["content"] for message in content]
    return [int(word) for text in texts for word in text.split()]


def encode_observation(messages: list[Message], last_sampled_token: int) -> list[int]:
    """Tokens after an action: STOP if its turn is still open, then the observation."""
    return [STOP] * (last_sampled_token != STOP) + encode(messages)


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in token_ids if token != STOP)


class Environment:
    """Environment that answers each action with the next of `replies`, or raises it if it is an exception."""

    def __init__(self, *replies: object, first: object = "1 2"):
        self.replies, self.first = list(replies), first
        self.actions: list[str] = []
        self.closed = False

    async def reset(self, prompt: Prompt) -> object:
        return self.say(self.first)

    async def step(self, action: str) -> object:
        self.actions.append(action)
        return self.say(self.replies.pop(0))

    async def close(self) -> None:
        self.closed = True

    def say(self, reply: object) -> object:
        if isinstance(reply, BaseException):
            raise reply
        return reply


def show(text: str, **others: Any) -> StepResult:
    return StepResult(Observation([Message(role="user", content=text)]), **others)


def done(reward: float) -> StepResult:
    return StepResult(done=True, score=Score(reward))


def append_context(*_: object) -> AppendContext:
    return AppendContext(encode, encode_observation, lambda content: ())


def memory_context(history_length: int = 2, longest: int = 100, truncation: Any = "error") -> Callable[..., Any]:
    prompts = PromptRenderer(encode, longest, truncation)
    return lambda environment, _: MemoryContext(environment, prompts, lambda content: (), history_length, "simple")


def make_runner(
    engine: FakeEngine,
    turns: int = 5,
    seconds: float = 5.0,
    per_turn: int | None = None,
    limit_reward: float | None = None,
    grade: Any = None,
    context: Callable[..., Any] = append_context,
) -> EpisodeRunner:
    limits = EpisodeLimits(turns, seconds, per_turn, limit_reward)
    return EpisodeRunner(engine, decode, context, limits, grade, decode_raw=lambda ids: "".join(f"<{i}>" for i in ids))


def play(
    answers: Sequence[list[int]] | FakeEngine,
    *environments: Any,
    max_tokens: int = 20,
    run: Callable[[Any], Any] = asyncio.run,
    **settings: Any,
) -> tuple[Trajectory, Requests]:
    """Play an episode with these answers of the engine. `environments`: one for each attempt. Returns the trajectory
    and the requests that the engine received."""
    asked: Requests = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        asked.append((list(token_ids), sampling))
        return answers[len(asked) - 1]

    engine = answers if isinstance(answers, FakeEngine) else FakeEngine(10, script=script)
    left, sampling = list(environments), Sampling(max_tokens, stop_token_ids=(STOP,))
    task = EpisodeTask(PROMPT, 1, lambda _: left.pop(0), sampling, lambda turn: 100 + turn, "t")
    return run(make_runner(engine, **settings).run(task)), asked


def play_group(
    engine: FakeEngine, make_environment: Any = None, run: Callable[[Any], Any] = asyncio.run, **request: Any
) -> TrajectoryGroup:
    """Play a group of four samples. Default: single-turn episodes whose reward is the first token of the answer."""

    async def grade(prompt: Prompt, text: str) -> Score:
        return Score(float(text.split()[0]))

    services = Services(grade, Env())
    make = make_environment or (lambda _: get_environment_spec("single_turn").factory(services))
    group = GroupRequest(replace(PROMPT, id=17), 4, Sampling(8, seed=42), **{"stream_position": 5} | request)
    return run(run_group(group, make_runner(engine).run, make))
