"""`env`: the environment of an episode, and its tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_CODE,
    CHANGES_ENVIRONMENT,
    CODE,
    NAMES_CODE,
    ActiveUnless,
    ActiveWhen,
    FilePath,
    RegisteredName,
    Requires,
    Scalar,
    Section,
)
from alphaapollo.config.schema.plugins import PluginSections, Sections, add_plugin_sections
from alphaapollo.utils.plugins import find_own_plugins

WHEN_MULTI_TURN = ActiveUnless("env_name", "single_turn", "agent")
WHEN_MEMORY = ActiveWhen("context", "memory")


def _make_environment_condition(env_name: str) -> ActiveWhen:
    """Return a marker for settings that have an effect only in the environment `env_name`."""
    return ActiveWhen("active_env_section", env_name, None, shown_key="env_name")


class EnvRollout(Section):
    n: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Group size: trajectories per prompt."""


class InformalMath(Section):
    enable_python_code: bool = True
    """Let the model run Python in the sandbox."""
    enable_local_rag: bool = False
    """Let the model search the index env.tool_settings.local_rag.index."""
    python_code_timeout: Annotated[
        PositiveFloat, ActiveWhen("/env.runs_python", reason="env.informal_math.enable_python_code is false")
    ] = 10.0
    """Seconds per piece of code, at most env.tool_limits.timeout."""


class Agent(Section):
    path: Annotated[str, CHANGES_ENVIRONMENT, CODE] = ""
    """Python file with `run(task, endpoint)`, which returns the reward; or set command."""
    command: Annotated[str, CHANGES_ENVIRONMENT, NAMES_CODE] = ""
    """Shell command of a program. It may write its reward as JSON to the file $ALPHAAPOLLO_RESULT."""
    environment: list[str] = []
    """Names of environment variables that are passed to the program, besides a few such as PATH and HOME."""
    grade: bool = False
    """Grade the text of the last answer with the reward function, as in other environments. A reward of the program is
    added."""
    train: Literal["all", "last", "main"] = "all"
    """Token sequences to train on, if a session has several: all; last = the one with the last answer; main = the
    longest one from the first request."""
    untrained_roles: list[str] = []
    """Roles (request header x-role) whose answers are not trained on."""
    timeout: PositiveFloat = 600.0
    """Seconds that a program may take, not counting the time of its requests."""
    max_requests: PositiveInt = 1000
    """Maximum answers that a session may request; a later request is refused, and ends the episode as the turn limit
    does."""
    reasoning_parser: str = ""
    """vLLM's parser that separates reasoning from the answer, e.g. qwen3; empty = the answer contains the reasoning."""


class ToolLimits(Section):
    timeout: PositiveFloat = 30.0
    """Seconds per tool call."""
    max_concurrent: PositiveInt = 32
    """Concurrent calls of one tool, per rollout worker."""
    max_output: PositiveInt = 8192
    """Maximum characters of a tool's output; longer output is cut in the middle."""


class McpServer(Section):
    command: Annotated[list[str], FilePath("unchecked")] = []
    """Program and arguments of a server that communicates over stdin and stdout; or set url."""
    url: str = ""
    """URL of a streamable HTTP server, e.g. http://localhost:8000/mcp."""
    environment: list[str] = []
    """Names of environment variables that are passed to the program."""
    tools: list[str] = []
    """Tools that are offered to the model; empty = all."""


@add_plugin_sections("env", _make_environment_condition)
class Env(Section):
    env_name: Annotated[
        str,
        Requires(ActiveWhen("/rollout.name", "vllm", "sglang"), when="agent"),
        Requires(ActiveWhen("/actor_rollout_ref.rollout.name", "vllm", "sglang"), when="agent"),
        CHANGES_ENVIRONMENT,
        RegisteredName("environments:get_environment_spec"),
    ] = "single_turn"
    """Environment, by its registered name, or by the name of a class in env.custom_module."""
    seed: int = 0
    """Seed of the environments' own randomness."""
    prompt: Annotated[str, ActiveWhen("reads_prompt", shown_key="env_name")] = ""
    """Your own prompt instead of the built-in one. Placeholders: informal_math and reasoning_gym `{question}`; openenv
    and classes of other frameworks `{observation}`."""
    custom_module: Annotated[str, CHANGES_CODE, CODE] = ""
    """Python file, or installed module, with your own environments: registered ones, or classes of other frameworks."""
    settings: dict[str, Scalar | list[Scalar]] = {}
    """Settings of your own environment, e.g. {size: 5}. It declares them, or they are arguments of its class."""
    max_steps: Annotated[PositiveInt, WHEN_MULTI_TURN] = 1
    """Maximum turns per episode."""
    max_tokens_per_turn: PositiveInt | None = None
    """Maximum tokens sampled per turn; null = the remaining tokens of data.max_response_length."""
    context: Annotated[Literal["append", "memory"], WHEN_MULTI_TURN] = "append"
    """Prompt of a turn: append = one growing sequence; memory = a fresh prompt from remembered steps."""
    history_length: Annotated[PositiveInt, WHEN_MEMORY] = 2
    """memory: number of steps in a fresh prompt, including the newest."""
    memory_type: Annotated[Literal["simple", "score", "ndimensional"], WHEN_MEMORY] = "simple"
    """memory: how steps are chosen for a fresh prompt: simple = newest, score = best score, ndimensional = score and
    brevity."""
    episode_timeout: Annotated[PositiveFloat, ActiveUnless("env_name", "agent")] = 600.0
    """Seconds that the environment of one episode may take, over all turns; time in the engine and in queues is not
    counted."""
    limit_reward: Annotated[float | None, ActiveUnless("env_name", "single_turn")] = None
    """Reward of an episode that reaches its limit of turns or tokens without an answer, e.g. -1. null = that of an
    empty answer; 0 if the environment computes the rewards."""
    rollout: EnvRollout = EnvRollout()
    action_format: Literal["tags", "chat_template"] = "tags"
    """Format of tool calls and answers: tags, or the native format of the model's chat template."""
    tool_parser: Annotated[str, ActiveWhen("parses_native_calls", True, shown_key="action_format")] = ""
    """vLLM's parser of tool calls, e.g. hermes. Empty: with chat_template, the tokenizer's response_template; with
    agent, answers have no tool calls."""
    tools: list[str] = []
    """Tools by name: python_code, local_rag, or your own."""
    mcp_servers: Annotated[dict[str, McpServer], NAMES_CODE] = {}
    """MCP servers by a name of your choice, e.g. {files: {command: [my-server, --root, data]}}. Each has a command or a
    url, and optionally environment (names of variables to pass) and tools (default all)."""
    tool_limits: ToolLimits = ToolLimits()
    tool_settings: dict[str, dict[str, Scalar]] = {}
    """Settings of tools by name, e.g. {local_rag: {index: data/index}}."""
    informal_math: Annotated[InformalMath, _make_environment_condition("informal_math")] = InformalMath()
    plugins: Annotated[Sections, PluginSections("env", "env_name", "single_turn"), Field(validate_default=True)] = {}
    """Settings of environments of installed packages by name, e.g. {maze: {size: 5}} (docs/plugins.md)."""
    agent: Annotated[Agent, _make_environment_condition("agent")] = Agent()

    @property
    def active_env_section(self) -> str | None:
        """Section that the environment reads, e.g. `informal_math`. None: env.custom_module may read any."""
        return None if self.custom_module else self.env_name

    @property
    def reads_prompt(self) -> bool:
        section = self.find_plugin_section(self.env_name)
        return bool(self.custom_module) or self.env_name == "informal_math" or getattr(section, "reads_prompt", False)

    def find_plugin_section(self, name: str) -> Any:
        """Return the section of the environment `name` of a plug-in or an installed package; None if it has none."""
        is_field = f"env.{name}" in find_own_plugins("sections")
        return getattr(self, name, None) if is_field else self.plugins.get(name)

    @property
    def parses_native_calls(self) -> bool:
        return self.action_format == "chat_template" or self.env_name == "agent"

    @property
    def runs_python(self) -> bool:
        return self.informal_math.enable_python_code or "python_code" in self.tools
