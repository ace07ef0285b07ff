"""The user's reward function (`custom_reward_function`): load it, and call it as its framework does.

A function has the parameters (prompt, completion) or (prompt, trajectory), or those of verl, TRL, OpenRLHF or ms-swift
(docs/reward_functions.md), which get their arguments by name, as far as the function has parameters for them. Functions
that take lists get all completions of a prompt in one call. A function may be async. custom_reward_function.name may
also be the name of a class of ms-swift, or a list of names."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import math
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

from alphaapollo.config.schema import CustomRewardFunction
from alphaapollo.rewards.base import RewardResult, adapt_to_episode, convert_to_score, is_async, make_failed_score
from alphaapollo.types import ChatMessage, Episode, Json, Prompt, Score
from alphaapollo.utils.user_module import UserObject, load_user_module, load_user_object

PATH_KEY, NAME_KEY = "custom_reward_function.path", "custom_reward_function.name"
SWIFT_MODULES = ("swift", "swift.rewards", "swift.rewards.orm", "swift.plugin", "swift.plugin.orm", "swift.utils")
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_NAMES = ("completions", "completion_ids", "completions_ids", "prompts", "trainer_state", "log_metric", "log_extra")
TRL_COLUMNS = ("ground_truth", "answer", "solution", "data_source", "reward_model", "extra_info", "messages")

TRUTHS = ("ground_truth", "ground_truths", "labels", "answer", "solution")  # parameters that get the ground truth

Result = Any  # of a user's function: any value, or an awaitable of it
EpisodeFunction = Callable[[Prompt, Episode], Result]  # returns a RewardResult or None, or an awaitable of it
GroupFunction = Callable[[Prompt, Sequence[Episode]], Result]  # returns a list of such results, or an awaitable of it


@dataclass(frozen=True)
class LoadedFunction:
    """The user's reward function, or the weighted sum of several."""

    function: Callable[..., Result]  # takes a prompt, and a completion or a trajectory
    is_async: bool = False  # whether it returns awaitables
    columns: tuple[str, ...] = ()  # columns that the data must have, including those of TRUTHS
    takes_prompt_text: bool = False  # whether it reads the rendered prompt
    grade_group: GroupFunction | None = None  # grades the completions of a prompt in one call; None: one at a time

    def grade_all(self, prompt: Prompt, episodes: Sequence[Episode]) -> Result:
        """Return a list of the results of the episodes, or an awaitable of it."""
        if self.grade_group:
            return self.grade_group(prompt, episodes)
        return _convert([adapt_to_episode(self.function)(prompt, episode) for episode in episodes], list)


def load_reward_function(custom: CustomRewardFunction) -> LoadedFunction:
    """Import the user's reward function. Raises ValueError if the file or the function is missing, the import fails
    (the message names the line), or the function has the parameters of no contract."""
    if custom.is_remote:
        return make_remote_function(custom.path)
    loaded = {name: _load_function(custom, name) for name in custom.names}
    if len(loaded) == 1 and not custom.weights:
        return loaded[custom.names[0]]
    grade_group = add_functions(loaded, custom.weights or [1.0] * len(loaded))
    return LoadedFunction(
        _make_episode_function(grade_group),
        is_async=any(function.is_async for function in loaded.values()),
        columns=tuple(dict.fromkeys(column for function in loaded.values() for column in function.columns)),
        takes_prompt_text=any(function.takes_prompt_text for function in loaded.values()),
        grade_group=grade_group if any(function.grade_group for function in loaded.values()) else None,
    )


def _load_function(custom: CustomRewardFunction, name: str) -> LoadedFunction:
    """Return a function adapted to its contract. Raises ValueError like load_reward_function."""
    function = _load_object(custom.path, name)
    try:
        if is_class := isinstance(function, type):
            function = function()
        names = inspect.signature(function).parameters.keys()
        if "environments" in names:
            raise ValueError(
                f"{NAME_KEY}={name} reads `environments`. Put it beside the class of env.env_name in the file of "
                f"env.custom_module, where it is found, and remove {PATH_KEY}."
            )
        contracts = (VERL, VERL_BATCH, OPENRLHF, TRL)
        if contract := next((contract for contract in contracts if names & {*contract.distinctive_names}), None):
            return replace(contract, has_texts=is_class).adapt(function, custom.reward_kwargs)
        inspect.signature(function).bind("prompt", "completion")
    except TypeError as error:
        raise ValueError(
            f"{NAME_KEY}: {custom.path}: {name} cannot be called ({error}). Use the parameters (prompt, completion), "
            f"(prompt, trajectory), or those of verl, ({', '.join(VERL_NAMES)}), TRL, (completions, **kwargs), or "
            "OpenRLHF, (queries, prompts, labels). The ground truth is prompt.ground_truth; other columns are in "
            "prompt.extra_info."
        ) from error
    return LoadedFunction(function, is_async(function))


def _load_object(path: str, name: str) -> UserObject:
    """Return an object of the user's file, or an object that the file registers in ms-swift's `orms`."""
    if "swift" not in sys.modules and importlib.util.find_spec("swift") is None:
        _add_swift_modules()
    if not hasattr(load_user_module(path, PATH_KEY), name):
        registries = [getattr(sys.modules.get(module), "orms", {}) for module in SWIFT_MODULES]
        if registered := next((registry[name] for registry in registries if name in registry), None):
            return registered
    return load_user_object(path, name, PATH_KEY, NAME_KEY)


def _add_swift_modules() -> None:
    """Add modules with the names that reward files of ms-swift import, because ms-swift is not installed."""

    class ORM:
        def __init__(self, args: object = None, **_: object):
            self.args = args

    contents = {"ORM": ORM, "AsyncORM": ORM, "orms": {}, "rm_plugins": {}, "get_logger": logging.getLogger}
    for name in SWIFT_MODULES:
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(contents, __path__=[])


@dataclass(frozen=True)
class Contract:
    """How a framework calls reward functions and reads their results."""

    names: tuple[str, ...]  # parameters that the framework passes
    distinctive_names: tuple[str, ...]  # a function with one of these parameters follows the contract
    make_arguments: Callable[[Prompt, Episode, bool], Mapping[str, object]]  # arguments for one completion
    read_results: Callable[[Result, int], Sequence[RewardResult | None]]  # results of this number of completions
    takes_lists: bool = True  # whether each argument is a list with the values of all completions
    has_columns: bool = False  # whether functions also get the columns of the data, and may log values
    has_prompt_text: bool = False  # whether functions get the rendered prompt
    has_texts: bool = False  # whether completions are texts although the prompts are chats, as for classes of ms-swift

    def adapt(self, function: Callable[..., Result], configured: Mapping[str, object]) -> LoadedFunction:
        """Wrap a function so that it takes (prompt, trajectory), or the trajectories of a group. configured: arguments
        from the configuration. Raises TypeError if it has parameters that the framework does not pass."""
        parameters = inspect.signature(function).parameters
        takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        columns = [
            name
            for name, parameter in parameters.items()
            if self.has_columns and name not in (*self.names, *configured) and parameter.default is parameter.empty
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        passed_names = [name for name in (*self.names, *columns, *configured) if name in parameters]
        truths = (name for name in TRUTHS if name in parameters and name not in configured)
        required_columns = [*columns, *(name for name in truths if parameters[name].default is inspect.Parameter.empty)]
        inspect.signature(function).bind(**dict.fromkeys(passed_names))

        def grade_group(prompt: Prompt, episodes: Sequence[Episode]) -> Result:
            logged, count = dict[str, Sequence[object]](), len(episodes)
            missing = dict.fromkeys(columns)  # columns that only other rows have
            rows = [missing | {**self.make_arguments(prompt, episode, self.has_texts)} for episode in episodes]
            lists: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0]}
            arguments = (lists if self.takes_lists else rows[0]) | {**configured}
            if self.has_columns:
                state = SimpleNamespace(global_step=episodes[0].step, max_steps=episodes[0].max_steps)
                arguments["trainer_state"] = state
                arguments["log_metric"] = lambda name, value: logged.update({name: [value] * count})
                arguments["log_extra"] = lambda name, values: logged.update({name: _split(values, count)})
            result = function(**{name: arguments[name] for name in arguments if takes_any_name or name in parameters})
            return _convert([result], lambda results: _add_logged_values(self.read_results(results[0], count), logged))

        grade_all = grade_group if self.takes_lists else None
        grade_one = _make_episode_function(grade_group)
        return LoadedFunction(grade_one, is_async(function), tuple(required_columns), self.has_prompt_text, grade_all)


def _make_episode_function(grade_group: GroupFunction) -> EpisodeFunction:
    def reward(prompt: Prompt, trajectory: Episode) -> Result:
        return _convert([grade_group(prompt, [trajectory])], lambda results: results[0][0])

    return reward


def add_functions(functions: Mapping[str, LoadedFunction], weights: Sequence[float]) -> GroupFunction:
    """Return a function that grades with several functions: the reward is the weighted sum of their rewards, which are
    also its components. A function that returns None does not apply to the row."""

    def add(results: Iterable[Result]) -> Score:
        named = zip(functions, results, strict=True)
        scores = {name: convert_to_score(result) for name, result in named if result is not None}
        if not scores:
            return make_failed_score(
                f"{', '.join(functions)} return None for this row. Return a number from one of them."
            )
        weight_of = dict(zip(functions, weights, strict=True))
        parts = {key: value for score in scores.values() for key, value in score.components.items()}
        parts |= {name: score.reward for name, score in scores.items()}
        failed = [score for score in scores.values() if score.outcome.failed]
        if failed:
            return failed[0]
        return Score(sum(weight_of[name] * score.reward for name, score in scores.items()), parts)

    def grade_group(prompt: Prompt, episodes: Sequence[Episode]) -> Result:
        results = [function.grade_all(prompt, episodes) for function in functions.values()]
        return _convert(results, lambda columns: [*map(add, zip(*columns, strict=True))])

    return grade_group


def _convert(results: Sequence[Result], convert: Callable[[Sequence[Result]], Result]) -> Result:
    """Return convert(results), or an awaitable of it if some results are awaitable. They are awaited concurrently."""

    async def wait(result: Result) -> Result:
        return await result if inspect.isawaitable(result) else result

    async def convert_later() -> Result:
        return convert(await asyncio.gather(*map(wait, results)))

    return convert_later() if any(map(inspect.isawaitable, results)) else convert(results)


def make_remote_function(url: str) -> LoadedFunction:
    """Return a function that asks a reward server of OpenRLHF, by POST of {query, prompts, labels}."""

    def post(body: bytes) -> Json:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as reply:
            return json.load(reply)

    async def ask(queries: list[str], prompts: list[str], labels: Sequence[object] = ()) -> Json:
        body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}, default=str)
        return await asyncio.to_thread(post, body.encode())

    return OPENRLHF.adapt(ask, {})


def _make_verl_arguments(prompt: Prompt, episode: Episode, _: bool) -> dict[str, object]:
    values = (prompt.data_source, episode.text, prompt.ground_truth, prompt.extra_info)
    return dict(zip(VERL_NAMES, values, strict=True))


def _make_openrlhf_arguments(prompt: Prompt, episode: Episode, _: bool) -> dict[str, object]:
    text = episode.prompt_text
    return {"queries": text + episode.text, "prompts": text, "labels": prompt.ground_truth}


def _make_trl_arguments(prompt: Prompt, episode: Episode, has_texts: bool) -> dict[str, object]:
    content, completion = prompt.content, list_messages(episode)
    chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
    ids = [token for turn in episode.turns for token in turn.token_ids]
    columns = dict.fromkeys(("ground_truth", "answer", "solution"), prompt.ground_truth) | {
        "data_source": prompt.data_source,
        "reward_model": {"ground_truth": prompt.ground_truth},
        "extra_info": prompt.extra_info,
        "messages": [*chat, *completion],
    }
    arguments = columns | prompt.extra_info | {"prompts": content, "completion_ids": ids, "completions_ids": ids}
    return arguments | {"completions": episode.text if has_texts or isinstance(content, str) else completion}


def list_messages(episode: Episode) -> list[ChatMessage]:
    """Return the messages of an episode after its prompt, as TRL's reward functions get them: answers, tool calls and
    their results."""
    messages = list[ChatMessage]()
    is_unfinished = any(turn.observation for turn in episode.turns[-1:])  # a limit ended the episode
    turns = episode.turns if is_unfinished else episode.turns[:-1]
    for turn in turns:
        messages += [turn.info.get("message") or {"role": "assistant", "content": turn.text}, *(turn.observation or [])]
    return messages if is_unfinished else [*messages, {"role": "assistant", "content": episode.text}]


def convert_verl_result(result: RewardResult) -> RewardResult:
    """Convert a dict of verl, `{"score": 0.5, "acc": 1, "pred": "7"}`, to `{"reward": 0.5, "accuracy": 1}`."""
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    converted = {str(key): value for key, value in result.items() if _is_number(value)}
    converted["reward"] = converted.pop("score", result["score"])
    if "acc" in converted:
        converted["accuracy"] = converted.pop("acc")
    return converted


def _read_verl_results(results: Result, count: int) -> list[Result]:
    return [*map(convert_verl_result, _split(results, count))]


def _read_openrlhf_results(result: Result, count: int) -> list[Result]:
    """Read a dict {rewards, scores, extra_logs}, or a list of rewards. Scores, from 0 to 1, are used by filters."""
    if not isinstance(result, Mapping):
        return _split(result, count)
    logs = result.get("extra_logs", {}).items()
    parts = {name: [value] * count if _is_number(value) else _split(value, count) for name, value in logs}
    parts = {name: values for name, values in parts.items() if all(map(_is_number, values))}
    if result.get("scores") is not None:
        parts["accuracy"] = _split(result["scores"], count)
    parts["reward"] = _split(result["rewards"], count)
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def _split(values: Result, count: int) -> list[Result]:
    """Return the elements of a list, array or tensor. Raises TypeError unless there are `count` elements."""
    is_list = hasattr(values, "__iter__") and getattr(values, "ndim", 1) != 0 and not isinstance(values, str | Mapping)
    elements = [*values] if is_list else []
    if len(elements) != count:
        raise TypeError(
            f"the result for {count} completions is {values!r:.80}. Return a list with one reward for each completion."
        )
    return elements


def _is_number(value: object) -> bool:
    """Return whether a value is a number, or an array or tensor with one element."""
    return isinstance(value, int | float) or (hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1)


def _add_logged_values(results: Sequence[Result], logged: Mapping[str, Sequence[object]]) -> list[Result]:
    """Add what a function of TRL has logged: numbers to the components, other values to the reason of the score."""

    def add(result: RewardResult | None, values: Mapping[str, Any]) -> RewardResult | None:
        if result is None or not values:
            return result
        score, numbers = convert_to_score(result), {name: value for name, value in values.items() if _is_number(value)}
        notes = [score.reason, *(f"{name}: {value}" for name, value in values.items() if name not in numbers)]
        accuracy = numbers.get("accuracy") if score.accuracy is None else score.accuracy
        parts, reason = score.components | numbers, "; ".join(filter(None, notes))
        return replace(score, components=parts, reason=reason, accuracy=accuracy)

    return [add(result, {name: values[i] for name, values in logged.items()}) for i, result in enumerate(results)]


VERL = Contract(
    VERL_NAMES,
    ("solution_str",),
    _make_verl_arguments,
    lambda result, _: [convert_verl_result(result)],
    takes_lists=False,
)
VERL_BATCH = Contract(
    tuple(f"{name}s" for name in VERL_NAMES),
    ("solution_strs",),
    lambda *given: {f"{name}s": value for name, value in _make_verl_arguments(*given).items()},
    _read_verl_results,
)
OPENRLHF = Contract(
    ("queries", "prompts", "labels"),
    ("queries",),
    _make_openrlhf_arguments,
    _read_openrlhf_results,
    has_prompt_text=True,
)
TRL = Contract((*TRL_NAMES, *TRL_COLUMNS), TRL_NAMES, _make_trl_arguments, _read_verl_results, has_columns=True)
