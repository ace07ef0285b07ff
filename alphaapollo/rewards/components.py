"""Named extra rewards, added with weights to what the prompt's own reward function says (`reward.components`).

    reward = w_task * task + sum over k of w_k * component_k

A component is a function `(prompt, completion) -> float`, usually in [0, 1]. It runs in the grader's process; its
factory here imports it there only. A user's own is registered by `reward_component`, in the file of
reward.custom_module.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from alphaapollo.rewards.base import failure
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.registry import Registry, nearest

Component = Callable[[Prompt, str], float]

TASK = "task"  # the reward of the data source, or of the user's function
COMPONENTS: Registry[Callable[[], Component]] = Registry("reward component")

ComponentT = TypeVar("ComponentT", bound=Component)


def reward_component(function: ComponentT) -> ComponentT:
    """Decorator: register a function as a component under its own name. It stays as it is.

    Raises:
        ValueError: the name is taken, or it does not take (prompt, completion).
    """
    name = function.__name__
    try:
        inspect.signature(function).bind("prompt", "completion")
    except TypeError as error:
        raise ValueError(f"reward component {name} must take (prompt, completion): {error}.") from error
    if name == TASK:
        raise ValueError(f"a reward component cannot be named {TASK}: that is the data source's own reward.")
    COMPONENTS.register(name)(lambda: function)
    return function


@COMPONENTS.register("format")
def _format() -> Component:
    from alphaapollo.rewards.think_format import think_format

    return think_format


@COMPONENTS.register("format_opened")
def _format_opened() -> Component:
    from alphaapollo.rewards.think_format import opened_think_format

    return opened_think_format


@COMPONENTS.register("language")
def _language() -> Component:
    from alphaapollo.rewards.language_consistency import same_language

    return same_language


@COMPONENTS.register("repetition")
def _repetition() -> Component:
    from alphaapollo.rewards.repetition import distinct_ngrams

    return distinct_ngrams


def check_components(names: Iterable[str], required: Iterable[str]) -> None:
    """Start-up check of reward.components and reward.required.

    Raises:
        ValueError: names nobody knows (all of them, with the nearest), or a required one that is not computed.
    """
    names, known = list(names), [TASK, *COMPONENTS.names()]
    if unknown := [name for name in names if name not in known]:
        near = dict.fromkeys(close for name in unknown for close in nearest(name, known, 1))
        hint = f"Did you mean {' and '.join(near)}? " if near else ""
        raise ValueError(
            f"reward.components: no component is named {' or '.join(map(repr, unknown))}. {hint}Known: "
            f"{', '.join(known)}. Register your own in the file of reward.custom_module."
        )
    if absent := [name for name in required if name not in [TASK, *names]]:
        have = ", ".join(names) or "which is empty"
        raise ValueError(
            f"reward.required: {', '.join(absent)} is not in reward.components ({have}). Give it a weight there; "
            "0 will do."
        )


def load_components(names: Iterable[str]) -> dict[str, Component]:
    """The functions by name, imported here (ValueError: an unknown name); `task` is not among them."""
    return {name: COMPONENTS.get(name)() for name in names if name != TASK}


def combine(task: Score, parts: Mapping[str, float], weights: Mapping[str, float], required: Iterable[str]) -> Score:
    """The task's score with the components `parts` in it.

    The reward is the weighted sum (`task` weighs 1 unless `weights` has it), or 0 if one of `required` is not above 0.
    Shown among the components, all without weights: `task` (the task's own reward), each part, what the task itself
    names, and `accuracy`, which stays the task's. Outcome and reason stay too; a failed task stays as it is.
    A failure: the task's reward function uses the name of a part, or `task`.
    """
    if task.outcome.failed:
        return task
    values = {TASK: task.reward, **parts}
    if clash := sorted(values.keys() & task.components.keys()):
        return failure(
            f"the reward function and reward.components both name {', '.join(clash)}: rename it in your function's "
            "dict, or leave it out of reward.components"
        )
    total = math.fsum(value * weights.get(name, 1.0) for name, value in values.items())
    if any(values[name] <= 0 for name in required):
        total = 0.0
    return Score(total, {"accuracy": task.accuracy} | task.components | values, task.outcome, task.reason)
