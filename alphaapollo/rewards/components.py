"""Reward components: extra rewards that `reward.components` adds, with weights, to the task reward.

    reward = w_task * task + sum over k of w_k * component_k

`task` is the reward of the built-in grader or of the user's function. A component is a judge (judges/), or a function
`(prompt, completion) -> float`, usually with values in [0, 1], that runs only in grader processes. Users register their
own components with the decorator `reward_component` in the file reward.custom_module.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from alphaapollo.rewards.base import explain_signature_mismatch, make_failed_score
from alphaapollo.rewards.judges.graders import JUDGES
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.registry import Registry

Component = Callable[[Prompt, str], float]
ComponentT = TypeVar("ComponentT", bound=Component)

TASK = "task"  # name of the task reward: the reward of the data source, or of the user's function
COMPONENTS: Registry[Callable[[], Component]] = Registry("reward component")  # name -> loader

for _name, _function in {
    "format": "text_components:score_format",
    "format_opened": "text_components:score_format_without_opening_tag",
    "language": "language_consistency:score_language",
    "repetition": "text_components:score_distinct_ngrams",
}.items():
    COMPONENTS.register(_name)(partial(pkgutil.resolve_name, f"alphaapollo.rewards.{_function}"))


def reward_component(function: ComponentT) -> ComponentT:
    """Decorator that registers a reward component under the name of the function. Raises ValueError if the name exists
    already or is reserved, or the function does not take (prompt, completion)."""
    name = function.__name__
    if reason := explain_signature_mismatch(function, "prompt", "completion"):
        raise ValueError(f"reward component {name} cannot be called ({reason}). Let it take (prompt, completion).")
    if name in (TASK, *JUDGES):
        raise ValueError(f"A reward component cannot be named {name}, the name of a built-in reward. Rename it.")
    COMPONENTS.register(name)(lambda: function)
    return function


def check_component_names(names: Iterable[str], required: Iterable[str]) -> None:
    """Raise ValueError if a component in `names` does not exist, or a `required` one is not in `names`."""
    names = {TASK, *names}
    for name in sorted(names - {TASK, *JUDGES}):
        COMPONENTS.get(name)
    if absent := [name for name in required if name not in names]:
        raise ValueError(
            f"reward.required: {absent[0]} is not in reward.components. Add it there with a weight, which may be 0."
        )


def load_components(names: Iterable[str]) -> dict[str, Component]:
    """Import the functions of reward components. Returns {name: function}, without `task` and judges, which have no
    function."""
    return {name: COMPONENTS.get(name)() for name in names if name not in (TASK, *JUDGES)}


def add_component_rewards(
    task_score: Score, components: Mapping[str, float], weights: Mapping[str, float], required: Iterable[str]
) -> Score:
    """Combine the task score and the values of the reward components into one score.

    Its reward is the weighted sum, where `task` has weight 1 unless `weights` contains it. The reward is 0 if a
    `required` component is not above 0. Its components are the unweighted values, including `task` and the components
    of the task score. Accuracy, outcome and reason are those of the task score. A failed task score is returned
    unchanged. If the task score already has a component of the same name, the result is a failed score.
    """
    if task_score.outcome.failed:
        return task_score
    values = {TASK: task_score.reward, **components}
    if duplicates := sorted(values.keys() & task_score.components.keys()):
        return make_failed_score(
            f"the reward function and reward.components both name {', '.join(duplicates)}. Rename it in your "
            "function's dict, or remove it from reward.components."
        )
    total = math.fsum(value * weights.get(name, 1.0) for name, value in values.items())
    if any(values[name] <= 0 for name in required):
        total = 0.0
    parts = {"accuracy": task_score.accuracy} | task_score.components | values
    return replace(task_score, reward=total, components=parts)
