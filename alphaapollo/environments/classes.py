"""Environment classes that were written for other frameworks, used as they are.

    TRL's environment_factory   reset(**columns) -> None, text or parts; public methods are tools; get_reward()
    Gymnasium, gym              reset(seed=...) -> observation[, info]; step(action) -> 5 or 4 results
    SkyRL-Gym                   init(messages) -> messages, metadata; step(text) -> {observations, reward, done, ...}

`register_environment_object` finds out which of these contracts a class has, and registers the class under its name."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.data.tool_rendering import describe_function
from alphaapollo.environments.actions import UNKNOWN_TOOL, ActionHandler
from alphaapollo.environments.base import (
    BUILT_IN,
    FinalAnswer,
    Observation,
    Services,
    StepResult,
    is_environment,
    register_environment,
)
from alphaapollo.environments.informal_math import describe_tool
from alphaapollo.environments.step_classes import (
    ConversationClass,
    ForeignEnvironment,
    StepClass,
    call,
    choose_arguments,
    list_columns,
)
from alphaapollo.rewards.base import convert_to_float, make_failed_score
from alphaapollo.rewards.custom import list_messages
from alphaapollo.tools.base import Session, Tool, ToolFailedError, ToolResult, ToolStatus
from alphaapollo.types import DERIVED, Episode, EpisodeTurn, Json, Message, Prompt, Score
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.plugins import find_plugins
from alphaapollo.utils.user_module import UserObject, load_user_module

INSTRUCTION = "\n\nDo exactly one thing:\n%sor end with <answer>...</answer>."
OBJECT = "environment"  # key of the episode's object in `Session.state`
CANCELLED = "cancelled"  # key in `Session.state`: a call was cancelled, and its thread may still use the object
FRAMEWORKS = {"gymnasium", "gym", "skyrl_gym"}  # packages of base classes
NOT_TOOLS = {"reset", "get_reward", "close"}
CONTRACTS = (
    "this project's own (__init__(services), reset, step, close); TRL's (reset, and public methods that are tools); "
    "Gymnasium's (reset, step); SkyRL-Gym's (init, step)"
)
IdleObjects = dict[str, list[object]]
"""Objects of ended episodes by env.settings. Later episodes reset and use them, as in TRL: most classes for TRL keep a
connection to a server, and have no method that closes it."""


def load_environment_module(config: Env) -> None:
    """Import env.custom_module. If nothing in it registers env.env_name, register its object of this name, or
    Gymnasium's environment of this id. Raises ValueError if neither exists."""
    name = config.env_name
    if not config.custom_module:
        return
    module = load_user_module(config.custom_module, "env.custom_module")
    if is_environment(name) or name in find_plugins("environments", BUILT_IN):
        return
    found, gymnasium = getattr(module, name, None), sys.modules.get("gymnasium")
    if found is None and gymnasium is not None and name in gymnasium.registry:
        found = partial(gymnasium.make, name)
    if not (callable(found) or isinstance(found, Mapping)):
        raise ValueError(
            f"env.env_name={name}: {config.custom_module} has no class or function of this name, and registers neither "
            "an environment nor an id of Gymnasium with this name. Correct the name."
        )
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    register_environment_object(name, rewards=[*filter(reads_environments, functions)])(found)


def reads_environments(function: Callable[..., object]) -> bool:
    """Return whether a function is a reward function of TRL that gets the objects of the episodes."""
    return "environments" in inspect.signature(function).parameters


def register_environment_object(
    name: str, graded: bool = False, rewards: Sequence[Callable[..., object]] = ()
) -> Callable[[UserObject], UserObject]:
    """Return a decorator that registers an environment class of this project or of another framework, or a function
    that creates environments. graded: whether a reward function grades the episodes. rewards: reward functions of TRL
    that read `environments`. The reward of an episode is the sum of these and of get_reward().

    The decorator raises ValueError if the object fits none of the contracts."""

    def register(factory: UserObject) -> UserObject:
        if isinstance(factory, Mapping):
            raise ValueError(
                f"the environment {name} is a dict of {', '.join(map(str, factory))}. All rows of a run have the same "
                "tools; use one class whose reset reads the row's column."
            )
        if _takes_services(factory):
            return register_environment(name, graded=graded)(factory)
        environment_class = factory if inspect.isclass(factory) else type(factory())  # TRL also creates one instance
        methods = inspect.getmembers(environment_class, inspect.isfunction)
        names = {method_name for method_name, _ in methods if not method_name.startswith("_")}
        tool_names = names - NOT_TOOLS
        if "init" in names and "step" in names:
            return register_environment(name, tools=None, keeps_settings=True)(partial(ConversationClass, factory))
        if "reset" in names and "step" in names and "get_reward" not in names:
            return register_environment(name, tools=None, keeps_settings=True)(partial(StepClass, factory))
        if "reset" not in names or not (tool_names or "get_reward" in names):
            listed = ", ".join(sorted(names)) or "none"
            raise ValueError(
                f"the environment {name} has the public methods {listed}, which fit none of the known contracts: "
                f"{CONTRACTS}. Add the missing methods."
            )
        is_graded = graded or not (rewards or "get_reward" in names)
        idle: IdleObjects = {}
        own_tools = partial(make_tools, environment_class, tool_names, idle)
        options: dict[str, Any] = {"graded": is_graded, "own_tools": own_tools, "keeps_settings": True}
        return register_environment(name, **options)(partial(ToolClass, factory, is_graded, rewards, idle=idle))

    return register


def _takes_services(factory: UserObject) -> bool:
    """Return whether an object is an environment of this project: it is called with `services`."""
    bases = {base.__module__.partition(".")[0] for base in getattr(factory, "__mro__", ())}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [item for item in inspect.signature(factory).parameters.values() if item.kind in positional]
    if bases & FRAMEWORKS or not parameters or parameters[0].name in ("env_config", "extras"):
        return False
    return parameters[0].name == "services" or parameters[0].default is inspect.Parameter.empty


def make_tools(environment_class: type, names: set[str], idle: IdleObjects | None = None) -> list[Tool]:
    """Return the methods of a class as tools, which drop the idle objects when they are closed."""
    return [MethodTool(getattr(environment_class, name), idle) for name in sorted(names)]


class MethodTool(Tool):
    """Tool that calls a method of the episode's object as TRL does: with the schema of transformers, the arguments that
    the model wrote, and the `str` of the result. A result may also be a list of parts of a message; images follow the
    text. method: the function of the class. Raises ValueError like `describe_function`."""

    def __init__(self, method: Callable[..., object], idle: IdleObjects | None = None):
        self._idle = {} if idle is None else idle
        self.function_schema = describe_function(method)
        self.name, self.description = self.function_schema["name"], self.function_schema["description"]
        self.parameters = {"type": "object"}  # the method checks its arguments, as in TRL

    async def call(self, arguments: JsonObject, session: Session) -> ToolResult:
        try:
            answer = await call(getattr(session.state[OBJECT], self.name), **arguments)
        except asyncio.CancelledError:
            session.state[CANCELLED] = True
            raise
        except ToolFailedError:
            raise
        except Exception as error:  # noqa: BLE001  the model sees the exceptions of its call
            return ToolResult(str(error), ToolStatus.ERROR)
        parts: list[Json] = answer if isinstance(answer, list) else []
        if not parts or not all(isinstance(part, dict) and part.get("type") in ("text", "image") for part in parts):
            return ToolResult(str(answer), ToolStatus.OK)
        images = [part["image"] for part in parts if part["type"] == "image"]
        return ToolResult("".join(part.get("text", "") for part in parts), ToolStatus.OK, images=images)

    async def close(self) -> None:
        await asyncio.to_thread(self._idle.clear)  # the destructors may be slow


class ToolClassActions(ActionHandler):
    """Action handler that shows failed calls as TRL does: `{'error': '...'}`."""

    def _make_message(self, name: str, result: ToolResult) -> Message:
        if result.status is not ToolStatus.OK:
            is_known = name == UNKNOWN_TOOL or (self._tools is not None and name in self._tools.names)
            text = str({"error": result.text if is_known else f"Tool {name} not found."})
            result = replace(result, text=text, status=ToolStatus.OK if self._parse_calls else result.status)
        return super()._make_message(name, result)


class ToolClass(ForeignEnvironment):
    """Environment of TRL's `environment_factory`: public methods are tools; an answer without a call ends the episode.

    The text or parts that `reset` returns are appended to the row's last message, as TRL does. The object of an episode
    is reused, unless it has a method `close`, or a call failed that was not the call of a tool."""

    def __init__(
        self,
        make: Callable[..., object],
        is_graded: bool,
        rewards: Sequence[Callable[..., object]],
        services: Services,
        idle: IdleObjects | None = None,
    ):
        super().__init__(make, services)
        self._services, self._is_graded, self._rewards = services, is_graded, rewards
        self._idle = ({} if idle is None else idle).setdefault(repr(self._config.settings), [])
        self._is_reusable = False
        self._actions = ToolClassActions(services.tools, services.parse_calls, services.sees_images, services.turns)
        self._session = Session()
        self._past_turns = list[EpisodeTurn]()

    async def reset(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        self._object = self._idle.pop() if self._idle else await self._create()
        self._session.state[OBJECT] = self._object
        columns = list_columns(prompt)
        shown = await self._use_object(self._object.reset, **choose_arguments(self._object.reset, columns))
        if shown is not None and not isinstance(shown, str | list):
            raise TypeError(f"reset returned a {type(shown).__name__}. Return a text, a list of parts, or None.")
        tools, instruction = self._services.tools, ""
        if self._config.action_format == "tags":
            calls = [describe_tool(schema["function"]) for schema in tools.schemas()] if tools else []
            instruction = INSTRUCTION % "".join(f"{call}\n" for call in calls)
        return self._show_prompt(prompt, shown or "", instruction)

    async def step(self, action: str) -> StepResult:
        result = await self._actions.handle(action, self._session)
        if isinstance(result, FinalAnswer):
            return StepResult(done=True, score=await self._score(result.text), kept_chars=result.kept_chars)
        if self._services.parse_calls and result.info.get("tool_status") == "unreadable":  # an answer, as in TRL
            return StepResult(done=True, score=await self._score(action), valid=False, info=result.info)
        if result.observation:
            self._past_turns.append(EpisodeTurn(action, result.observation.messages, info=result.info))
        return result

    async def score_at_limit(self) -> Score:
        return await self._score(None)

    async def close(self) -> None:
        if hasattr(self._object, "close"):
            await super().close()
        elif self._is_reusable and CANCELLED not in self._session.state:
            self._idle.append(self._object)

    async def _use_object(self, function: Callable[..., object], **arguments: object) -> Any:
        """Call a function that uses the object. If the call fails or is cancelled, the object is not reused."""
        self._is_reusable = False
        result = await call(function, **arguments)
        self._is_reusable = True
        return result

    async def _score(self, text: str | None) -> Score:
        """Return the sum of the grade of the text, get_reward(), and the reward functions that read `environments`.
        text: None if a limit ended the episode."""
        score = await self._services.score(self._prompt, text or "") if self._is_graded else Score(0.0)
        if score.outcome.failed:
            return score
        rewards: dict[str, Any] = {}
        if hasattr(self._object, "get_reward"):
            rewards[type(self._object).__name__] = await self._use_object(self._object.get_reward)
        for function in self._rewards:
            arguments = choose_arguments(function, self._list_reward_arguments(text))
            name = function.__name__ if function.__name__ not in rewards else f"{function.__name__}_{len(rewards)}"
            (rewards[name],) = await self._use_object(function, **arguments)
        applicable = {name: reward for name, reward in rewards.items() if reward is not None}
        if not applicable and self._is_graded:
            return score
        if not applicable:
            return make_failed_score(f"{', '.join(rewards)} returned None instead of a reward")
        parts = {name: convert_to_float(value, name) for name, value in applicable.items()}
        reward = sum(parts.values())
        if not self._is_graded and reward in (0.0, 1.0):
            parts["accuracy"] = reward
        parts = {**score.components, **parts}
        return replace(score, reward=score.reward + reward, components=parts, accuracy=DERIVED)

    def _list_reward_arguments(self, text: str | None) -> JsonObject:
        """Return the arguments of a reward function of TRL for one episode: lists of one value."""
        prompt = self._prompt.content
        turns = [*self._past_turns, *([] if text is None else [EpisodeTurn(text)])]
        completion = (text or "") if isinstance(prompt, str) else list_messages(Episode(text or "", turns))
        columns = {name: [value] for name, value in list_columns(self._prompt).items()}
        return columns | {"prompts": [prompt], "completions": [completion], "environments": [self._object]}
