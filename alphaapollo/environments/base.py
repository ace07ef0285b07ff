"""Environment protocol: an environment exchanges messages with the model for one episode. It handles no tokens.

    factory(services) -> environment
    reset(prompt) -> Observation | str      then, until done:      step(action) -> StepResult      finally: close()

Without tools or feedback, an episode has one step (single_turn.py). Each method may be sync or async. Async
methods share the event loop with all other episodes, so they must await slow operations. Sync methods run in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from alphaapollo.config.build import build_config
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import Env
from alphaapollo.config.schema.base import Section
from alphaapollo.tools.base import Tool, ToolCallParser
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import JsonObject, Message, Prompt, Score, Turn
from alphaapollo.utils.plugins import find_plugins, load_plugin
from alphaapollo.utils.registry import Registry

ScoreFn = Callable[[Prompt, str], Awaitable[Score]]
"""Call the reward function in its process: `await score(prompt, text)`. A failed grade is a Score, not an exception."""


class EnvironmentFailure(Exception):
    """Error for an environment that raised an exception or returned an invalid value."""


@contextmanager
def wrap_environment_errors(operation: str) -> Iterator[None]:
    """Context manager that converts exceptions to EnvironmentFailure, with a message that starts with `operation`."""
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise EnvironmentFailure(f"{operation}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages that the model sees next, e.g. `[{"role": "user", "content": "2+2=?"}]`.

    With images: `{"role": "user", "content": "<image> How many?", "images": [PNG]}`, with one `<image>` for each. An
    image is an encoded file (bytes), a path, a PIL image, or a uint8 array [height, width, 3]. A content may also be
    a list of parts: `[{"type": "image", "image": PNG}, {"type": "text", "text": "How many?"}]`.
    """

    messages: list[Message]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one action of the model. See docs/environments.md for the fields."""

    observation: Observation | None = None  # None after the last action
    done: bool = False
    reward: float = 0.0  # reward of this step
    valid: bool = True  # False: the text had no readable action
    score: Score | None = None  # score of the complete episode, with `done`; an episode without a score has score 0
    kept_chars: int | None = None  # length of the text that the environment used; later text is cut off, not trained
    info: JsonObject = field(default_factory=dict)  # `state`: key of the state before the action, for credit


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """Final answer of a model, in a turn without a tool call."""

    text: str  # text to grade: the model's text up to the end of the answer, with its tags
    kept_chars: int | None = None  # see StepResult.kept_chars


class Environment(Protocol):
    """Environment of one episode of one prompt.

    After an exception, the episode is retried once in a new environment. After a second exception, it is masked (not
    trained on). An optional method `score_at_limit() -> Score` scores an episode that a limit of turns or tokens ends.
    With env.context=memory, an optional method `recall(steps: Sequence[memory.Step]) -> list[Message]`
    returns the prompt of each later turn. By default, that prompt is the first observation and the past steps.
    """

    def reset(self, prompt: Prompt) -> Observation | str | Awaitable[Observation | str]:
        """Start the episode. Returns the prompt of the first turn: messages, or a text that the model continues."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Execute an action: the model's text of this turn without special tokens."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the episode. Called exactly once, also after an error."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """Services for the environment of one episode: reward function, settings, tools, and the episode's turns."""

    score: ScoreFn
    config: Env
    tools: ToolBox | None = None  # tools of env.tools and env.mcp_servers, and tools that the environment enables
    parse_calls: ToolCallParser | None = None  # parser of tool calls, with env.action_format=chat_template
    sees_images: bool = False  # whether the model is a vision-language model
    turns: Sequence[Turn] = ()  # of the episode so far, including the turn that `step` processes

    @property
    def settings(self) -> Any:
        """Settings of the environment (env.settings, or the section of its plug-in or package), as an object of the
        class that the environment declares."""
        name = self.config.env_name
        return self.config.find_plugin_section(name) or get_environment_spec(name).read_settings(self.config)


EnvironmentFactory = Callable[[Services], Environment]
"""Creates an environment from its services. Usually the environment class, with `__init__(self, services)`."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """Registered environment and the properties that are checked before a run starts."""

    factory: EnvironmentFactory
    graded: bool | Callable[[Env], bool] = False  # whether it scores with `Services.score`; then rows need a grader
    check: Callable[[Env], None] | None = None  # raises ValueError for invalid settings
    tools: Callable[[Env], list[str]] | None = lambda config: config.tools  # names of the tools; None: no tool calls
    own_prompts: bool = False  # True: creates and scores its prompts, so rows need no reward function
    settings: type[Section] | None = None  # class of env.settings; None: the environment has no settings
    keeps_settings: bool = False  # True: env.settings are arguments of a class without declared settings
    own_tools: Callable[[], Sequence[Tool]] | None = None  # makes the tools that are part of the environment

    def is_graded(self, config: Env) -> bool:
        """Return whether episodes are scored by the reward function, so that each row needs one."""
        return self.graded(config) if callable(self.graded) else self.graded

    def list_tools(self, config: Env) -> list[str]:
        """Return the names of all tools but those of env.mcp_servers."""
        own = self.own_tools() if self.own_tools else ()
        return [*(tool.name for tool in own), *(self.tools(config) if self.tools else ())]

    def read_settings(self, config: Env) -> Section | None:
        """Convert env.settings to the class `settings`. Raises ValueError for settings that the class does not have."""
        if self.settings is None:
            if config.settings and not self.keeps_settings:
                raise ValueError(f"env.settings={config.settings}: {config.env_name} has no settings. Remove them.")
            return None
        try:
            return build_config(self.settings, dict(config.settings))
        except ConfigError as error:
            raise ValueError("\n".join(f"env.settings.{line}" for line in error.errors)) from None


_ENVIRONMENTS: Registry[EnvironmentSpec] = Registry("environment")
BUILT_IN = ("agent", "informal_math", "single_turn")
FactoryT = TypeVar("FactoryT", bound=EnvironmentFactory)


def register_environment(name: str, **options: Any) -> Callable[[FactoryT], FactoryT]:
    """Decorator that registers an environment class as env.env_name=name. `options`: fields of EnvironmentSpec."""
    return _ENVIRONMENTS.register(name, lambda factory: EnvironmentSpec(factory, **options))


def is_environment(name: str) -> bool:
    """Return whether an environment of this name is registered, without importing packages."""
    return name in _ENVIRONMENTS


def get_environment_spec(name: str) -> EnvironmentSpec:
    """Return the environment of a name: a registered one, or that of a plug-in or an installed package. Raises
    ValueError with the known names if there is none."""
    plugins = find_plugins("environments", BUILT_IN)
    if name in plugins and name not in _ENVIRONMENTS:
        factory = load_plugin("environments", name)  # may register itself, to set the fields of EnvironmentSpec
        if name not in _ENVIRONMENTS:
            register_environment(name)(factory)
    return _ENVIRONMENTS.get(name, plugins)


def find_tool_sources(config: Env) -> dict[str, Any]:
    """Return the settings of the sources of tools that the configuration selects: {"mcp_servers": env.mcp_servers}."""
    settings = {name: getattr(config, name, config.plugins.get(name)) for name in find_plugins("tool_sources")}
    return {name: value for name, value in settings.items() if value}


def check_environment(config: Env) -> EnvironmentSpec:
    """Return the environment of env.env_name. Raises ValueError if it is unknown, incomplete or rejects a setting."""
    spec, name = get_environment_spec(config.env_name), config.env_name
    if spec.tools is None and (config.tools or find_tool_sources(config) or config.action_format != "tags"):
        raise ValueError(
            f"env.env_name={name} does not call tools. Remove env.tools, env.mcp_servers and env.action_format, or "
            "use an environment with tools (informal_math, or your own)."
        )
    spec.read_settings(config)
    if spec.check is not None:
        spec.check(config)
    return spec
