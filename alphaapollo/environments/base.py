"""Environment protocol: an environment exchanges messages with the model for one episode, without tokens or limits.

    factory(services) -> environment
    reset(prompt) -> Observation | str      then, until done:      step(action) -> StepResult      finally: close()

A prompt with a reward function is the one-step case (single_turn.py). Each method may be sync or async. Async methods
share the event loop with all other episodes, so they must await slow operations; sync methods run in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from alphaapollo.config.schema import Env
from alphaapollo.tools.tool_calls import ToolCallParser
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.registry import Registry

METHODS = ("reset", "step", "close")  # of an environment

ScoreFn = Callable[[Prompt, str], Awaitable[Score]]
"""`await score(prompt, text)`: call the reward function in its process. A grader's failure is a Score, no exception."""


class EnvironmentFailure(Exception):
    """The environment raised an exception or returned an invalid value."""


@contextmanager
def wrap_environment_errors(what: str) -> Iterator[None]:
    """Turn any exception of environment code into an EnvironmentFailure with a reason."""
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise EnvironmentFailure(f"{what}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages that the model sees next, e.g. `[{"role": "user", "content": "2+2=?"}]`."""

    messages: list[Message]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one action. The fields are explained in docs/environments.md."""

    observation: Observation | None = None  # None after the last action
    done: bool = False
    reward: float = 0.0  # of this step alone
    valid: bool = True  # False: the text had no readable action
    score: Score | None = None  # of the whole episode, with `done`; an episode that ends without one is worth 0
    kept_chars: int | None = None  # the environment used the text up to here; the rest is cut off and never trained on
    info: dict[str, Any] = field(default_factory=dict)  # `state`: where the action was taken, for step-level credit


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The model answered instead of calling a tool."""

    text: str  # up to the end of the answer: what is to be graded
    kept_chars: int | None = None  # as StepResult.kept_chars


class Environment(Protocol):
    """One episode of one prompt. After an exception the episode is retried once on a new environment, then masked.

    With env.context=memory, an optional method `recall(steps: Sequence[memory.Step]) -> list[Message]` writes the
    prompt of each later turn. The default is the first observation and the steps as messages.
    """

    def reset(self, prompt: Prompt) -> Observation | str | Awaitable[Observation | str]:
        """First observation: messages, or a text that the model continues."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """`action` is the model's text of this turn without special tokens."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the episode. Called once, however the episode ended."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What environments may use besides their prompt; shared by all episodes of a rollout worker."""

    score: ScoreFn
    config: Env
    tools: ToolBox | None = None  # of env.tools and env.mcp_servers, and those that the environment enables
    parse_calls: ToolCallParser | None = None  # with env.action_format=chat_template


EnvironmentFactory = Callable[[Services], Environment]
"""Usually the class itself, with `__init__(self, services)`."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """A registered environment and what is known of it before a run starts."""

    factory: EnvironmentFactory
    graded: bool = False  # scores with `Services.score`, so each row needs a reward function
    check: Callable[[Env], None] | None = None  # raises ValueError for invalid settings
    tools: Callable[[Env], list[str]] | None = lambda config: config.tools  # names of its tools; None: calls no tools
    own_prompts: bool = False  # scores its own prompts with `Services.score`: rows need no reward function


_ENVIRONMENTS: Registry[EnvironmentSpec] = Registry("environment")
FactoryT = TypeVar("FactoryT", bound=EnvironmentFactory)


def register_environment(name: str, **options: Any) -> Callable[[FactoryT], FactoryT]:
    """Decorator: register a factory as env.env_name=name. The options are the fields of `EnvironmentSpec`."""

    def add(factory: FactoryT) -> FactoryT:
        _ENVIRONMENTS.register(name)(EnvironmentSpec(factory, **options))
        return factory

    return add


def get_environment_spec(name: str) -> EnvironmentSpec:
    """Return the environment of that name (ValueError: lists the known and the nearest names)."""
    return _ENVIRONMENTS.get(name)


def check_environment(config: Env) -> EnvironmentSpec:
    """Check that the environment exists and accepts its settings (ValueError), before a run starts."""
    spec, name = _ENVIRONMENTS.get(config.env_name), config.env_name
    cls = spec.factory  # other factories than classes are not checked
    if isinstance(cls, type) and (missing := [one for one in METHODS if not callable(getattr(cls, one, None))]):
        raise ValueError(
            f"env.env_name={name}: the class {cls.__name__} has no method {' and no '.join(missing)}. Add "
            f"{', '.join(METHODS)}; if there is nothing to free: `async def close(self): ...`."
        )
    if spec.tools is None and (config.tools or config.mcp_servers or config.action_format != "tags"):
        raise ValueError(
            f"env.env_name={name} calls no tools. Remove env.tools, env.mcp_servers and env.action_format, or use an "
            "environment with tools (informal_math, or your own)."
        )
    if config.tool_parser and config.action_format == "tags":
        raise ValueError(
            f"env.tool_parser={config.tool_parser} has no effect with env.action_format=tags. Set "
            "env.action_format=chat_template or remove env.tool_parser."
        )
    if spec.check is not None:
        spec.check(config)
    return spec
