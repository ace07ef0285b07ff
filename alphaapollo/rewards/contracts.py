"""Call reward functions that are written for verl, TRL, OpenRLHF or ms-swift (docs/reward_functions.md).

Arguments are passed by name, as far as the function has parameters for them. Batches have one element. Values of the
data are those of the file.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from alphaapollo.rewards.base import RewardResult, adapt_to_episode, convert_to_score
from alphaapollo.types import Episode, Prompt, Score

EpisodeFunction = Callable[[Prompt, Episode], Any]  # returns a RewardResult or None, or an awaitable of it
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_NAMES = ("completions", "completion_ids", "completions_ids", "prompts", "trainer_state", "log_metric", "log_extra")
COLUMNS = ("ground_truth", "answer", "solution", "data_source", "reward_model", "extra_info", "messages")


@dataclass(frozen=True)
class Contract:
    """How a framework calls reward functions."""

    names: tuple[str, ...]  # parameters that the framework passes
    marks: tuple[str, ...]  # a function with one of these parameters follows the contract
    make_arguments: Callable[[Prompt, Episode], Mapping[str, object]]
    read_result: Callable[[Any], RewardResult | None]
    has_columns: bool = False  # whether functions also get the columns of the data, and may log values


def find_contract(function: Callable[..., object]) -> Contract | None:
    """Return the contract that a function follows; None for the parameters (prompt, completion or trajectory)."""
    names = {*inspect.signature(function).parameters}
    return next((one for one in (VERL, VERL_BATCH, OPENRLHF, TRL) if names & {*one.marks}), None)


def list_required_columns(function: Callable[..., object], contract: Contract, more: Collection[str]) -> list[str]:
    """Return the names of the columns that a function requires. `more`: names of arguments from the configuration."""
    return [
        one.name
        for one in inspect.signature(function).parameters.values()
        if contract.has_columns and one.name not in (*contract.names, *more)
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]


def adapt_function(function: Callable[..., Any], contract: Contract, more: Mapping[str, object]) -> EpisodeFunction:
    """Wrap a function of a contract so that it takes (prompt, trajectory). `more`: arguments from the configuration."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    absent = {name: [None] for name in list_required_columns(function, contract, more)}  # columns of other rows

    def reward(prompt: Prompt, trajectory: Episode) -> Any:
        logged: dict[str, Any] = {}
        arguments = absent | {**contract.make_arguments(prompt, trajectory)} | {**more}
        if contract.has_columns:
            arguments |= {
                "log_metric": logged.__setitem__,
                "log_extra": lambda name, values: logged.update({name: _take_only(values)}),
            }
        result = function(**{name: arguments[name] for name in arguments if takes_all or name in parameters})
        return _finish([result], lambda found: _add_logged_values(contract.read_result(found[0]), logged))

    return reward


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


def make_remote_function(url: str) -> EpisodeFunction:
    """Return a function that asks a reward server of OpenRLHF, by POST of {query, prompts, labels}."""

    def post(body: bytes) -> Any:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as reply:
            return json.load(reply)

    async def ask(queries: list[str], prompts: list[str], labels: list[object]) -> Any:
        body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}, default=str)
        return await asyncio.to_thread(post, body.encode())

    return adapt_function(ask, OPENRLHF, {})


def _make_verl_arguments(prompt: Prompt, episode: Episode) -> dict[str, object]:
    values = (prompt.data_source, episode.text, prompt.ground_truth, prompt.extra_info)
    return dict(zip(VERL_NAMES, values, strict=True))


def _make_verl_batch_arguments(prompt: Prompt, episode: Episode) -> dict[str, object]:
    return {f"{name}s": [value] for name, value in _make_verl_arguments(prompt, episode).items()}


def _make_openrlhf_arguments(prompt: Prompt, episode: Episode) -> dict[str, object]:
    values = (episode.prompt_text + episode.text, episode.prompt_text, prompt.ground_truth)
    return {name: [value] for name, value in zip(OPENRLHF.names, values, strict=True)}


def _make_trl_arguments(prompt: Prompt, episode: Episode, as_text: bool = False) -> dict[str, object]:
    """`as_text`: completions are texts although the prompts are chats, as in ms-swift."""
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
    batches["completions"] = episode.text if as_text or isinstance(content, str) else [answer]
    state = SimpleNamespace(global_step=episode.step, max_steps=episode.max_steps)
    return {name: [value] for name, value in batches.items()} | {"trainer_state": state}


def convert_verl_result(result: RewardResult) -> RewardResult:
    """Rename `score` and `acc` in the dict of a verl reward function, and remove entries that are not numbers.

    `{"score": 0.5, "acc": 1, "pred": "7"}` becomes `{"reward": 0.5, "accuracy": 1}`. Results other than a dict with
    `score` are returned unchanged.
    """
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    converted = {str(key): value for key, value in result.items() if _is_number(value)}
    converted["reward"] = converted.pop("score", result["score"])
    if "acc" in converted:
        converted["accuracy"] = converted.pop("acc")
    return converted


def _convert_verl_batch_result(results: Any) -> RewardResult:
    return convert_verl_result(_take_only(results))


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
    if len(found := list(values)) != 1:
        raise ValueError(f"the result has {len(found)} rewards for one completion. Return one for each completion.")
    return found[0]


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
    tuple(f"{name}s" for name in VERL_NAMES), ("solution_strs",), _make_verl_batch_arguments, _convert_verl_batch_result
)
OPENRLHF = Contract(("queries", "prompts", "labels"), ("queries",), _make_openrlhf_arguments, _convert_openrlhf_result)
TRL = Contract((*TRL_NAMES, *COLUMNS), TRL_NAMES, _make_trl_arguments, _take_only, has_columns=True)
SWIFT = replace(TRL, marks=(), make_arguments=partial(_make_trl_arguments, as_text=True))  # for classes
