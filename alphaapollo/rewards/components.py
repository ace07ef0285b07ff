"""Named extra rewards that `reward.components` adds, with weights, to the reward of the prompt's own reward function.

    reward = w_task * task + sum over k of w_k * component_k

A component is a function `(prompt, completion) -> float`, usually in [0, 1]. It runs in the grader process and is
imported there only. `reward_component` registers a user's own, in the file of reward.custom_module.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from alphaapollo.rewards.base import failed_score, signature_mismatch
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.registry import Registry

Component = Callable[[Prompt, str], float]
ComponentT = TypeVar("ComponentT", bound=Component)

TASK = "task"  # name of the reward of the data source, or of the user's function
COMPONENTS: Registry[Callable[[], Component]] = Registry("reward component")  # name -> loader

for _name, _function in {
    "format": "think_format:score_format",
    "format_opened": "think_format:score_opened_format",
    "language": "language_consistency:score_language",
    "repetition": "repetition:score_distinct_ngrams",
}.items():
    COMPONENTS.register(_name)(partial(pkgutil.resolve_name, f"alphaapollo.rewards.{_function}"))


def reward_component(function: ComponentT) -> ComponentT:
    """Decorator: register a function as a component under its own name, and return it unchanged.

    Raises:
        ValueError: the name is taken or reserved, or the function does not take (prompt, completion).
    """
    name = function.__name__
    if problem := signature_mismatch(function, "prompt", "completion"):
        raise ValueError(f"reward component {name} must take (prompt, completion): {problem}.")
    if name == TASK:
        raise ValueError(f"a reward component cannot be named {TASK}, the name of the data source's own reward.")
    COMPONENTS.register(name)(lambda: function)
    return function


def check_components(names: Iterable[str], required: Iterable[str]) -> None:
    """Check reward.components and reward.required at startup (ValueError: an unknown name, or one not computed)."""
    names = {TASK, *names}
    for name in sorted(names - {TASK}):
        COMPONENTS.get(name)
    if absent := [name for name in required if name not in names]:
        raise ValueError(
            f"reward.required: {', '.join(absent)} is not in reward.components. Add it with a weight, which may be 0."
        )


def load_components(names: Iterable[str]) -> dict[str, Component]:
    """Import the functions by name, without `task` (ValueError: an unknown name)."""
    return {name: COMPONENTS.get(name)() for name in names if name != TASK}


def add_components(
    task: Score, components: Mapping[str, float], weights: Mapping[str, float], required: Iterable[str]
) -> Score:
    """Add the values of `components` to the task's score.

    The reward is the weighted sum (`task` has weight 1 unless `weights` names it), or 0 if one of `required` is not
    above 0. The components of the result are unweighted: `task`, the given ones and the task's own. `accuracy`,
    outcome and reason stay the task's, and a failed task stays as it is. Using a name twice is a failure.
    """
    if task.outcome.failed:
        return task
    values = {TASK: task.reward, **components}
    if duplicates := sorted(values.keys() & task.components.keys()):
        return failed_score(
            f"the reward function and reward.components both name {', '.join(duplicates)}. Rename it in your "
            "function's dict, or remove it from reward.components."
        )
    total = math.fsum(value * weights.get(name, 1.0) for name, value in values.items())
    if any(values[name] <= 0 for name in required):
        total = 0.0
    return Score(total, {"accuracy": task.accuracy} | task.components | values, task.outcome, task.reason)
