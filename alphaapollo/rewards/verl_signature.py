"""Adapter for reward functions with verl's signature, `(data_source, solution_str, ground_truth, extra_info)`.

A function gets these arguments by name, as from verl's naive reward manager; it may leave some out, or take all with
`**kwargs`. In a returned dict, `score` is the reward and `acc` the accuracy; other entries that are numbers are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from alphaapollo.rewards.base import RewardFunction, RewardResult, signature_mismatch
from alphaapollo.types import Prompt

NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")  # of verl's batch reward manager


def has_verl_signature(function: Callable[..., Any]) -> bool:
    """Whether a parameter has the name of verl's completion."""
    names = inspect.signature(function).parameters
    return "solution_str" in names or "solution_strs" in names


def adapt_verl_function(function: Callable[..., Any], where: str) -> RewardFunction:
    """Wrap a function to take (prompt, completion).

    Args:
        where: the key and the file, which begin an error message.

    Raises:
        ValueError: it needs arguments that are not available.
    """
    signature = inspect.signature(function)
    named = f"{where}: {function.__name__}{signature}"
    if batched := [name for name in BATCHED if name in signature.parameters]:
        raise ValueError(
            f"{named} takes a whole batch ({', '.join(batched)}). Write it for one completion: ({', '.join(NAMES)})."
        )
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    names = [name for name in NAMES if takes_all or name in signature.parameters]
    if problem := signature_mismatch(function, **dict.fromkeys(names)):
        raise ValueError(
            f"{named} is called with {', '.join(names)} by name, as in verl: {problem}. Give "
            "its other parameters a default."
        )

    def reward(prompt: Prompt, completion: str) -> RewardResult:
        arguments = {
            "data_source": prompt.data_source,
            "solution_str": completion,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        return convert_verl_result(function(**{name: arguments[name] for name in names}))

    return reward


def convert_verl_result(result: Any) -> Any:
    """Convert a dict with `score` to this project's names; return anything else unchanged.

    Example: `{"score": 0.5, "acc": True, "pred": "7"}` -> `{"reward": 0.5, "accuracy": 1.0}`.
    """
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    converted = {str(key): value for key, value in result.items() if _is_number(value)}
    converted["reward"] = converted.pop("score", result["score"])
    if "acc" in converted:
        converted["accuracy"] = converted.pop("acc")
    return converted


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "size", 2) == 1)
