"""What an environment is: it speaks messages, lives for one episode, and knows neither tokens nor limits.

    factory(services) -> environment
    reset(prompt) -> Observation | str      then, until done:      step(action) -> StepResult      at last: close()

Everything is an environment; a prompt with a reward function is the one-step case (single_turn.py). Each method may be
sync or async. Async ones share the event loop with every other episode, so they must await whatever takes time; sync
ones run in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from alphaapollo.config.schema import Env
from alphaapollo.tools.base import Session
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.tools.written_calls import ReadCalls
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.registry import Registry

METHODS = ("reset", "step", "close")  # an environment's

ScoreFn = Callable[[Prompt, str], Awaitable[Score]]
"""`await score(prompt, text)`: the reward function in its isolation. Never raises for a grader's trouble."""


class EnvironmentFailure(Exception):
    """The environment raised, or returned what it must not."""


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Whatever environment code raises becomes a failure with a reason."""
    try:
        yield
    except Exception as error:  # environments are the user's code and may raise anything
        raise EnvironmentFailure(f"{what}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages that the model is shown next, e.g. `[{"role": "user", "content": "2+2=?"}]`."""

    messages: list[Message]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of one action.

    `observation` is what the model sees next (none after the last action). `reward` is the step's own; what the whole
    episode was worth is `score`, given with `done` (an episode that ends without one is worth 0).
    """

    observation: Observation | None = None
    done: bool = False
    reward: float = 0.0
    valid: bool = True  # false: the environment could not read an action in the text
    score: Score | None = None
    kept_chars: int | None = None  # the environment used the text up to here: what follows is cut off, never trained on
    info: dict[str, Any] = field(default_factory=dict)  # `state`: where the action was taken, for step-level credit


@dataclass(frozen=True, slots=True)
class Answer:
    """The model answered instead of calling a tool."""

    text: str  # up to the end of the answer: what is to be graded
    kept_chars: int | None = None  # as StepResult.kept_chars


class Actions(Protocol):
    """Carries out what a model's text says. Holds nothing of an episode: that is the session's."""

    async def take(self, text: str, session: Session) -> StepResult | Answer:
        """A StepResult after calls: return it from `step`. Whatever a model may have written is answered: what cannot
        be read, and calls that are refused, are invalid turns which tell the model why. A tool that breaks ends the
        episode as a failure of the environment: masked, without a reward."""
        ...


class Environment(Protocol):
    """One episode of one prompt. An exception anywhere is an environment failure: the episode is tried once more on a
    fresh environment, then masked.

    With env.context=memory, a method `recall(steps: Sequence[memory.Step]) -> list[Message]`, if there is one, writes
    the fresh prompt of each later turn; without it the first observation and the steps follow each other as messages.
    """

    def reset(self, prompt: Prompt) -> Observation | str | Awaitable[Observation | str]:
        """The first observation: messages, or a text that the model continues as it is."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """`action` is the model's text of this turn, special tokens left out."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what the episode held. Called once, however it ended."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What environments may use besides their prompt; shared by all episodes of a rollout worker."""

    score: ScoreFn
    config: Env
    tools: ToolBox | None = None  # those of env.tools and env.mcp_servers, and what the environment itself enables
    read_calls: ReadCalls | None = None  # with env.action_format=chat_template: see actions.py


EnvironmentFactory = Callable[[Services], Environment]
"""Usually the class itself, with `__init__(self, services)`."""


@dataclass(frozen=True, slots=True)
class Registered:
    """An environment by name, and what can be known of it before anything starts."""

    factory: EnvironmentFactory
    graded: bool  # it scores by `Services.score`, so each row needs a reward function
    check: Callable[[Env], None] | None  # raises ValueError for settings with which it cannot work
    tools: Callable[[Env], list[str]] | None  # names of the tools that it is given; None: it calls none
    own_prompts: bool = False  # it scores by `Services.score` what it asks itself: rows need no reward function


_ENVIRONMENTS: Registry[Registered] = Registry("environment")
FactoryT = TypeVar("FactoryT", bound=EnvironmentFactory)


def register_environment(
    name: str,
    *,
    graded: bool = False,
    check: Callable[[Env], None] | None = None,
    tools: Callable[[Env], list[str]] | None = lambda config: config.tools,
    own_prompts: bool = False,
) -> Callable[[FactoryT], FactoryT]:
    """Decorator: env.env_name=name. The options are the fields of `Registered`."""

    def add(factory: FactoryT) -> FactoryT:
        _ENVIRONMENTS.register(name)(Registered(factory, graded, check, tools, own_prompts))
        return factory

    return add


def get_environment(name: str) -> EnvironmentFactory:
    """What makes the environment of that name (ValueError: lists the known and the nearest names)."""
    return _ENVIRONMENTS.get(name).factory


def get_registered(name: str) -> Registered:
    """All that is known of the environment of that name (ValueError as above)."""
    return _ENVIRONMENTS.get(name)


def check_environment(config: Env) -> Registered:
    """Start-up check: the environment is there and can work with its settings (ValueError)."""
    registered = _ENVIRONMENTS.get(config.env_name)
    _check_methods(config.env_name, registered.factory)
    if registered.tools is None and (config.tools or config.mcp_servers or config.action_format != "tags"):
        raise ValueError(
            f"env.env_name={config.env_name} calls no tools: leave out env.tools, env.mcp_servers and "
            "env.action_format, or take an environment that does (informal_math, or your own)."
        )
    if config.tool_parser and config.action_format == "tags":
        raise ValueError(
            f"env.tool_parser={config.tool_parser} reads calls in the model's own format: set "
            "env.action_format=chat_template too, or leave it out."
        )
    if registered.check is not None:
        registered.check(config)
    return registered


def _check_methods(name: str, factory: EnvironmentFactory) -> None:
    """What another factory than a class makes is not known before it makes it."""
    if isinstance(factory, type) and (missing := [one for one in METHODS if not callable(getattr(factory, one, None))]):
        raise ValueError(
            f"env.env_name={name}: the class {factory.__name__} has no method {' and no '.join(missing)}. An "
            f"environment has {', '.join(METHODS)}; where there is nothing to free: `async def close(self): ...`."
        )
