"""The user's reward function (`custom_reward_function`): load it, and call it as its framework does.

A function has the parameters (prompt, completion) or (prompt, trajectory), or those of verl, TRL, OpenRLHF or ms-swift
(docs/reward_functions.md), which get their arguments by name, as far as the function has parameters for them, in
batches of one element. It may be async. The name may also be that of a class of ms-swift, or a list of names.
"""

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
from alphaapollo.rewards.base import RewardResult, adapt_to_episode, convert_to_score, is_async
from alphaapollo.types import Episode, Prompt, Score
from alphaapollo.utils.user_module import load_user_module, load_user_object

PATH_KEY, NAME_KEY = "custom_reward_function.path", "custom_reward_function.name"
SWIFT_MODULES = ("swift", "swift.rewards", "swift.rewards.orm", "swift.plugin", "swift.plugin.orm", "swift.utils")
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_NAMES = ("completions", "completion_ids", "completions_ids", "prompts", "trainer_state", "log_metric", "log_extra")
COLUMNS = ("ground_truth", "answer", "solution", "data_source", "reward_model", "extra_info", "messages")

TRUTHS = ("ground_truth", "ground_truths", "labels", "answer", "solution")  # parameters that get the ground truth

EpisodeFunction = Callable[[Prompt, Episode], Any]  # returns a RewardResult or None, or an awaitable of it


@dataclass(frozen=True)
class LoadedFunction:
    """The user's reward function, or the weighted sum of several."""

    function: Callable[..., Any]  # takes a prompt, and a completion or a trajectory
    is_async: bool = False  # whether it returns awaitables
    columns: tuple[str, ...] = ()  # columns of the data that it requires, and parameters for the ground truth (TRUTHS)
    takes_prompt_text: bool = False  # whether it reads the rendered prompt


def load_reward_function(custom: CustomRewardFunction) -> LoadedFunction:
    """Import the user's reward function. Raises ValueError if the file or the function is missing, the import fails
    (the message names the line), or the function has the parameters of no contract."""
    if custom.is_remote:
        return make_remote_function(custom.path)
    loaded = {name: _load_function(custom, name) for name in custom.names}
    if len(loaded) == 1 and not custom.weights:
        return loaded[custom.names[0]]
    functions = {name: one.function for name, one in loaded.items()}
    return LoadedFunction(
        add_functions(functions, custom.weights or [1.0] * len(functions)),
        any(one.is_async for one in loaded.values()),
        tuple(dict.fromkeys(column for one in loaded.values() for column in one.columns)),
        any(one.takes_prompt_text for one in loaded.values()),
    )


def _load_function(custom: CustomRewardFunction, name: str) -> LoadedFunction:
    """Return a function adapted to its contract. Raises ValueError like load_reward_function."""
    function = _load_object(custom.path, name)
    try:
        if is_class := isinstance(function, type):
            function = function()
        names = inspect.signature(function).parameters.keys()
        if contract := next((one for one in (VERL, VERL_BATCH, OPENRLHF, TRL) if names & {*one.marks}), None):
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


def _load_object(path: str, name: str) -> Any:
    """Return an object of the user's file, or the one that the file registers in ms-swift's `orms`."""
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

    names = {"ORM": ORM, "AsyncORM": ORM, "orms": {}, "rm_plugins": {}, "get_logger": logging.getLogger}
    for name in SWIFT_MODULES:
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(names, __path__=[])


@dataclass(frozen=True)
class Contract:
    """How a framework calls reward functions and reads their results."""

    names: tuple[str, ...]  # parameters that the framework passes
    marks: tuple[str, ...]  # a function with one of these parameters follows the contract
    make_arguments: Callable[[Prompt, Episode, bool], Mapping[str, object]]
    read_result: Callable[[Any], RewardResult | None]
    has_columns: bool = False  # whether functions also get the columns of the data, and may log values
    has_prompt_text: bool = False  # whether functions get the rendered prompt
    has_texts: bool = False  # whether completions are texts although the prompts are chats, as for classes of ms-swift

    def adapt(self, function: Callable[..., Any], more: Mapping[str, object]) -> LoadedFunction:
        """Wrap a function so that it takes (prompt, trajectory). `more`: arguments from the configuration. Raises
        TypeError if it has parameters that the framework does not pass."""
        parameters = inspect.signature(function).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        columns = [
            one.name
            for one in parameters.values()
            if self.has_columns and one.name not in (*self.names, *more)
            if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        given = [name for name in (*self.names, *columns, *more) if name in parameters]
        truths = (one for one in TRUTHS if one in parameters and one not in more)
        needed = [*columns, *(name for name in truths if parameters[name].default is inspect.Parameter.empty)]
        inspect.signature(function).bind(**dict.fromkeys(given))

        def reward(prompt: Prompt, trajectory: Episode) -> Any:
            logged: dict[str, Any] = {}
            arguments: dict[str, Any] = {name: [None] for name in columns}  # of other rows
            arguments |= {**self.make_arguments(prompt, trajectory, self.has_texts)} | {**more}
            if self.has_columns:
                arguments["log_metric"] = logged.__setitem__
                arguments["log_extra"] = lambda name, values: logged.update({name: _take_only(values)})
            result = function(**{name: arguments[name] for name in arguments if takes_all or name in parameters})
            return _finish([result], lambda found: _add_logged_values(self.read_result(found[0]), logged))

        return LoadedFunction(reward, is_async(function), tuple(needed), self.has_prompt_text)


def add_functions(functions: Mapping[str, Callable[..., Any]], weights: Sequence[float]) -> EpisodeFunction:
    """Return a function whose reward is the weighted sum of several functions, and whose components are their rewards.
    A function that returns None does not apply to the row."""

    def add(results: Iterable[Any]) -> Score:
        named = zip(functions, results, strict=True)
        scores = {name: convert_to_score(result) for name, result in named if result is not None}
        if not scores:
            raise TypeError(f"{', '.join(functions)} return None for this row. Return a number from one of them.")
        factors = dict(zip(functions, weights, strict=True))
        parts = {key: value for score in scores.values() for key, value in score.components.items()}
        parts |= {name: score.reward for name, score in scores.items()}
        failed = [score for score in scores.values() if score.outcome.failed]
        return failed[0] if failed else Score(sum(factors[name] * one.reward for name, one in scores.items()), parts)

    def reward(prompt: Prompt, trajectory: Episode) -> Any:
        return _finish([adapt_to_episode(one)(prompt, trajectory) for one in functions.values()], add)

    return reward


def _finish(results: Sequence[Any], convert: Callable[[Sequence[Any]], Any]) -> Any:
    """Return convert(results), or an awaitable of it if some results are awaitable. They are awaited concurrently."""

    async def wait(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    async def convert_later() -> Any:
        return convert(await asyncio.gather(*map(wait, results)))

    return convert_later() if any(map(inspect.isawaitable, results)) else convert(results)


def make_remote_function(url: str) -> LoadedFunction:
    """Return a function that asks a reward server of OpenRLHF, by POST of {query, prompts, labels}."""

    def post(body: bytes) -> Any:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as reply:
            return json.load(reply)

    async def ask(queries: list[str], prompts: list[str], labels: Sequence[object] = ()) -> Any:
        body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}, default=str)
        return await asyncio.to_thread(post, body.encode())

    return OPENRLHF.adapt(ask, {})


def _make_verl_arguments(prompt: Prompt, episode: Episode, _: bool) -> dict[str, object]:
    values = (prompt.data_source, episode.text, prompt.ground_truth, prompt.extra_info)
    return dict(zip(VERL_NAMES, values, strict=True))


def _make_verl_batch_arguments(prompt: Prompt, episode: Episode, _: bool) -> dict[str, object]:
    return {f"{name}s": [value] for name, value in _make_verl_arguments(prompt, episode, _).items()}


def _make_openrlhf_arguments(prompt: Prompt, episode: Episode, _: bool) -> dict[str, object]:
    text = episode.prompt_text
    return {"queries": [text + episode.text], "prompts": [text], "labels": [prompt.ground_truth]}


def _make_trl_arguments(prompt: Prompt, episode: Episode, has_texts: bool) -> dict[str, object]:
    content, answer = prompt.content, {"role": "assistant", "content": episode.text}
    chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
    ids = [*episode.turns[-1].token_ids] if episode.turns else []
    columns = dict.fromkeys(("ground_truth", "answer", "solution"), prompt.ground_truth) | {
        "data_source": prompt.data_source,
        "reward_model": {"ground_truth": prompt.ground_truth},
        "extra_info": prompt.extra_info,
        "messages": [*chat, answer],
    }
    batches = columns | prompt.extra_info | {"prompts": content, "completion_ids": ids, "completions_ids": ids}
    batches["completions"] = episode.text if has_texts or isinstance(content, str) else [answer]
    state = SimpleNamespace(global_step=episode.step, max_steps=episode.max_steps)
    return {name: [value] for name, value in batches.items()} | {"trainer_state": state}


def convert_verl_result(result: RewardResult) -> RewardResult:
    """Convert a dict of verl, `{"score": 0.5, "acc": 1, "pred": "7"}`, to `{"reward": 0.5, "accuracy": 1}`."""
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    converted = {str(key): value for key, value in result.items() if _is_number(value)}
    converted["reward"] = converted.pop("score", result["score"])
    if "acc" in converted:
        converted["accuracy"] = converted.pop("acc")
    return converted


def _convert_openrlhf_result(result: Any) -> Any:
    """Read {rewards, scores, extra_logs}, where scores, from 0 to 1, are for filters; or rewards alone."""
    if not isinstance(result, Mapping):
        return _take_only(result)
    logs = result.get("extra_logs", {}).items()
    parts = {name: value if _is_number(value) else _take_only(value) for name, value in logs}
    parts = {name: value for name, value in parts.items() if _is_number(value)}
    if result.get("scores") is not None:
        parts["accuracy"] = _take_only(result["scores"])
    return parts | {"reward": _take_only(result["rewards"])}


def _take_only(values: Any) -> Any:
    """Return the only element of a list, array or tensor. Raises TypeError or ValueError for another value."""
    if isinstance(values, str | Mapping):
        raise TypeError(f"the result is {values!r:.80}. Return a list with one reward for each completion.")
    (value,) = values
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1)


def _add_logged_values(result: RewardResult | None, logged: Mapping[str, Any]) -> RewardResult | None:
    """Add what a function of TRL has logged: numbers to the components, other values to the reason of the score."""
    if result is None or not logged:
        return result
    score, numbers = convert_to_score(result), {name: value for name, value in logged.items() if _is_number(value)}
    notes = [score.reason, *(f"{name}: {value}" for name, value in logged.items() if name not in numbers)]
    return replace(score, components=score.components | numbers, reason="; ".join(filter(None, notes)))


VERL = Contract(VERL_NAMES, ("solution_str",), _make_verl_arguments, convert_verl_result)
VERL_BATCH = Contract(
    tuple(f"{name}s" for name in VERL_NAMES),
    ("solution_strs",),
    _make_verl_batch_arguments,
    lambda results: convert_verl_result(_take_only(results)),
)
OPENRLHF = Contract(
    ("queries", "prompts", "labels"),
    ("queries",),
    _make_openrlhf_arguments,
    _convert_openrlhf_result,
    has_prompt_text=True,
)
TRL = Contract((*TRL_NAMES, *COLUMNS), TRL_NAMES, _make_trl_arguments, _take_only, has_columns=True)
