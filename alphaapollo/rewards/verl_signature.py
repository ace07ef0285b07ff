"""Reward functions with verl's signature, `(data_source, solution_str, ground_truth, extra_info)`, as ours.

A function gets by name what verl's naive reward manager passes by name; it may leave some out, or take all with
`**kwargs`. Of a result that is a dict, `score` is the reward and `acc` the accuracy; what is no number is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from alphaapollo.rewards.base import RewardFunction, RewardResult
from alphaapollo.types import Prompt

NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")  # of verl's batch reward manager


def has_verl_signature(function: Callable[..., Any]) -> bool:
    """Does a parameter have the name of verl's completion?"""
    names = inspect.signature(function).parameters
    return "solution_str" in names or "solution_strs" in names


def from_verl(function: Callable[..., Any]) -> RewardFunction:
    """The function of (prompt, completion) that calls it by name (ValueError: it wants what we cannot give)."""
    signature = inspect.signature(function)
    if batched := [name for name in BATCHED if name in signature.parameters]:
        raise ValueError(
            f"{function.__name__}{signature} takes a whole batch ({', '.join(batched)}); write it for one completion: "
            f"({', '.join(NAMES)})."
        )
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    names = [name for name in NAMES if takes_all or name in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            f"{function.__name__}{signature} is called with {', '.join(names)} by name, as in verl: {error}. Give its "
            "other parameters a default."
        ) from error

    def reward(prompt: Prompt, completion: str) -> RewardResult:
        given = {
            "data_source": prompt.data_source,
            "solution_str": completion,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        return read_result(function(**{name: given[name] for name in names}))

    return reward


def read_result(result: Any) -> Any:
    """What a function of verl's returns, in our words; what is no dict with `score` is left as it is.

    Example: `{"score": 0.5, "acc": True, "pred": "7"}` -> `{"reward": 0.5, "accuracy": 1.0}`.
    """
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    read = {str(key): value for key, value in result.items() if _is_number(value)}
    read["reward"] = read.pop("score", result["score"])
    if "acc" in read:
        read["accuracy"] = read.pop("acc")
    return read


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "size", 2) == 1)
