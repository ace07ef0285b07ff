"""Load the user's reward function (`custom_reward_function`), with this project's, verl's or TRL's signature.

verl's signature is `(data_source, solution_str, ground_truth, extra_info)`, and TRL's is `(prompts, completions, ...)`
with lists and columns of the data. These arguments are passed by name. A function with `solution_str` or `completions`
may omit the others, or accept all with `**kwargs`. The lists for TRL's functions have one element.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence

from alphaapollo.rewards.base import RewardFunction, RewardResult, explain_signature_mismatch
from alphaapollo.types import Prompt
from alphaapollo.utils.user_module import load_user_object

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(path: str, name: str) -> RewardFunction:
    """Import the user's reward function from a file. A function with verl's parameters is adapted.

    Raises ValueError if the file or the function is missing, the import fails (the message names the line), or the
    function accepts neither (prompt, completion), nor (prompt, trajectory), nor verl's parameters.
    """
    path_key, name_key = "custom_reward_function.path", "custom_reward_function.name"
    function = load_user_object(path, name, path_key, name_key)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ValueError(f"{name_key}: {name} in {path} is {kind}. Define it as `def {name}(prompt, completion)`.")
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if "completions" in parameters:
        adapted, reason = adapt_trl_function(function, None if takes_all else {*parameters}), ""
    elif "solution_str" in parameters:
        names = [one for one in VERL_NAMES if takes_all or one in parameters]
        reason = explain_signature_mismatch(function, **dict.fromkeys(names))
        adapted = adapt_verl_function(function, names)
    else:
        adapted, reason = function, explain_signature_mismatch(function, "prompt", "completion")
    if reason:
        raise ValueError(
            f"{name_key}: {path}: {name}{inspect.signature(function)} has unsupported parameters ({reason}). Use "
            f"(prompt, completion), (prompt, trajectory), or those of verl, ({', '.join(VERL_NAMES)}), or TRL, "
            "(completions, **kwargs). The ground truth is prompt.ground_truth; other columns are in prompt.extra_info."
        )
    return adapted


def adapt_verl_function(function: Callable[..., RewardResult], parameter_names: list[str]) -> RewardFunction:
    """Wrap a reward function with verl's parameters so that it takes (prompt, completion)."""

    def reward(prompt: Prompt, completion: str) -> RewardResult:
        values = (prompt.data_source, completion, prompt.ground_truth, prompt.extra_info)
        arguments = dict(zip(VERL_NAMES, values, strict=True))
        return convert_verl_result(function(**{name: arguments[name] for name in parameter_names}))

    return reward


def adapt_trl_function(
    function: Callable[..., Sequence[RewardResult]], names: Collection[str] | None
) -> RewardFunction:
    """Wrap a reward function of TRL so that it takes (prompt, completion). `names`: its parameters; None: any."""

    def reward(prompt: Prompt, completion: str) -> RewardResult:
        is_chat = not isinstance(prompt.content, str)
        columns = prompt.extra_info | {
            "answer": prompt.ground_truth,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "prompts": prompt.content,
            "completions": [{"role": "assistant", "content": completion}] if is_chat else completion,
        }
        (value,) = function(**{name: [value] for name, value in columns.items() if names is None or name in names})
        return value

    return reward


def convert_verl_result(result: RewardResult) -> RewardResult:
    """Rename `score` and `acc` in the dict of a verl reward function, and remove entries that are not numbers.

    `{"score": 0.5, "acc": 1, "pred": "7"}` becomes `{"reward": 0.5, "accuracy": 1}`. Results other than a dict with
    `score` are returned unchanged.
    """
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    converted = {
        str(key): value
        for key, value in result.items()
        if isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "size", 2) == 1)
    }
    converted["reward"] = converted.pop("score", result["score"])
    if "acc" in converted:
        converted["accuracy"] = converted.pop("acc")
    return converted
