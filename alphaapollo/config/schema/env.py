"""`env`: what the model acts in, its tools among it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Scalar, Section


class EnvRollout(Section):
    n: PositiveInt = 1
    """Group size: trajectories a prompt."""


class GuessingGame(Section):
    numbers: PositiveInt = 100
    """The number to guess is one of 1 to this."""
    prompt: str = ""
    """Instructions in place of the game's own; `{numbers}` and `{steps}` are filled in."""


class GridWorld(Section):
    size: Annotated[int, Field(ge=2, le=50)] = 5
    """Rows and columns of the grid."""
    walls: Annotated[float, Field(ge=0.0, le=0.5)] = 0.2
    """Share of the cells that are walls."""
    view: Literal["map", "coordinates"] = "map"
    """What is seen each turn: the grid drawn, or in words where one is, where the goal is, and the walls beside."""
    step_penalty: NonNegativeFloat = 0.0
    """What each step costs."""
    prompt: str = ""
    """Instructions in place of the game's own; `{size}`, `{steps}`, `{legend}` and `{view}` are filled in."""


class ReasoningGym(Section):
    tasks: list[str] = []
    """Tasks of the package reasoning-gym by name, one is drawn for each row; [all] = all of them."""
    level: NonNegativeInt | None = None
    """Difficulty, in the package's curriculum of each task; null = the task's default settings."""
    settings: dict[str, dict[str, Scalar | list[Scalar]]] = {}
    """Settings of tasks, e.g. {chain_sum: {max_terms: 3}}; they win over the level's."""
    prompt: str = ""
    """What is asked in place of the environment's own words; `{question}` is filled in."""


class Verifiers(Section):
    name: str = ""
    """What `verifiers.load_environment` takes: the name of an installed environment."""
    args: dict[str, Scalar | list[Scalar]] = {}
    """Arguments that it is loaded with."""


class OpenEnv(Section):
    url: str = ""
    """The environment server, e.g. http://localhost:8000."""
    action_field: str = "message"
    """The field of its action that takes the model's answer, unless that is a JSON object: then it is the action."""
    observation_field: str = ""
    """The field of its observation that the model sees; empty = all of it, as JSON."""
    prompt: str = ""
    """What is said first in place of the environment's own words; `{observation}` is filled in."""


class InformalMath(Section):
    enable_python_code: bool = True
    """The model may run Python in the sandbox."""
    enable_local_rag: bool = False
    """The model may search the index of env.tool_settings.local_rag.index."""
    python_code_timeout: PositiveFloat = 10.0
    """Seconds for one piece of code, at most env.tool_limits.timeout."""
    prompt: str = ""
    """What is asked in place of the environment's own words; `{question}` is filled in."""


class ToolLimits(Section):
    timeout: PositiveFloat = 30.0
    """Seconds a tool call may take."""
    max_concurrent: PositiveInt = 32
    """Calls of one tool at work at a time, on each rollout worker."""
    max_output: PositiveInt = 8192
    """Characters of a tool's answer; more are cut from its middle."""


class McpServer(Section):
    command: list[str] = []
    """The program and its arguments, which speaks over stdin and stdout; or give its url."""
    url: str = ""
    """The address of its streamable HTTP endpoint, e.g. http://localhost:8000/mcp."""
    environment: list[str] = []
    """Names of environment variables that are handed on to the program."""
    tools: list[str] = []
    """Those of its tools that are offered; empty = all."""


class Env(Section):
    env_name: str = "single_turn"
    """The environment, by name in the registry."""
    seed: int = 0
    """Seed of the environments' own randomness."""
    custom_module: str = ""
    """Python file that registers your own environments."""
    max_steps: PositiveInt = 1
    """Turns of an episode at most."""
    max_tokens_per_turn: PositiveInt | None = None
    """Tokens sampled in one turn at most; null = what is left of data.max_response_length."""
    context: Literal["append", "memory"] = "append"
    """How the model sees the past: one growing sequence, or a fresh prompt each turn from remembered steps."""
    history_length: PositiveInt = 2
    """memory: steps that a fresh prompt shows, the newest among them."""
    memory_type: Literal["simple", "score", "ndimensional"] = "simple"
    """memory: which steps: the last ones, those of best score, or those of best rank by score and brevity."""
    episode_timeout: PositiveFloat = 600.0
    """Seconds that the environment of one episode may take, over all turns. The engine's time does not count, nor do
    queues for graders, tools and threads: a long response ends at its token limit."""
    rollout: EnvRollout = EnvRollout()
    action_format: Literal["tags", "chat_template"] = "tags"
    """How the model calls tools and answers: in tags, or as it was trained to, by its chat template."""
    tool_parser: str = ""
    """chat_template: vLLM's parser of the model's calls, e.g. hermes; empty = the tokenizer's own response_template."""
    tools: list[str] = []
    """Tools by name, for environments that use them: python_code, local_rag, your own."""
    mcp_servers: dict[str, McpServer] = {}
    """MCP servers by a name of yours, e.g. {files: {command: [my-server, --root, data]}}: each has a command or a url,
    names of environment variables that the command sees, and which of its tools are offered (default all)."""
    tool_limits: ToolLimits = ToolLimits()
    tool_settings: dict[str, dict[str, Scalar]] = {}
    """Settings of tools by name, e.g. {local_rag: {index: data/index}}."""
    informal_math: InformalMath = InformalMath()
    guessing_game: GuessingGame = GuessingGame()
    grid_world: GridWorld = GridWorld()
    reasoning_gym: ReasoningGym = ReasoningGym()
    verifiers: Verifiers = Verifiers()
    openenv: OpenEnv = OpenEnv()
