"""Loading of the user's own reward function (`custom_reward_function`)."""

from __future__ import annotations

import inspect

from alphaapollo.rewards.base import RewardFunction, signature_mismatch
from alphaapollo.rewards.verl_signature import adapt_verl_function, has_verl_signature
from alphaapollo.utils.user_module import load_user_object


def load_reward_function(path: str, name: str) -> RewardFunction:
    """Import a reward function from a file, in the grader process.

    Raises:
        ValueError: no such file, an import error (with the line), no such function, or one that takes neither (prompt,
            completion), nor (prompt, trajectory), nor verl's parameters.
    """
    key, name_key = "custom_reward_function.path", "custom_reward_function.name"
    function = load_user_object(path, name, key, name_key)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ValueError(f"{name_key}: {name} in {path} is {kind}. Write a plain `def {name}(prompt, completion)`.")
    if has_verl_signature(function):
        return adapt_verl_function(function, f"{name_key}: {path}")
    if problem := signature_mismatch(function, "prompt", "completion"):
        raise ValueError(
            f"{name_key}: {path}: {name}{inspect.signature(function)} must take (prompt, completion) or (prompt, "
            f"trajectory), or verl's (data_source, solution_str, ground_truth, extra_info): {problem}. The ground "
            "truth is prompt.ground_truth, other columns are in prompt.extra_info."
        )
    checked: RewardFunction = function
    return checked
