"""Reward functions of installed packages (docs/plugins.md): graders of the data sources NAME and NAME/*, and components
of this name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from alphaapollo.config.schema import Reward
from alphaapollo.config.schema.plugins import find_section_class
from alphaapollo.utils.plugins import load_plugin


def load_plugin_reward(name: str, reward: Reward) -> Callable[..., Any] | None:
    """Import the reward function of a package; None if no package has it. A parameter `settings` of the function gets
    the section reward.plugins.NAME. Raises ValueError if the import fails or the function has other parameters."""
    function: Callable[..., Any] | None = load_plugin("rewards", name)
    if function is None:
        return None
    try:
        if "settings" in inspect.signature(function).parameters:
            section = find_section_class("reward", name)
            function = partial(function, settings=reward.plugins.get(name) or (section() if section else None))
        inspect.signature(function).bind("prompt", "completion")
    except TypeError as error:
        raise ValueError(
            f"reward function {name} of alphaapollo.rewards cannot be called ({error}). Let it take (prompt, "
            "completion), and optionally settings."
        ) from error
    return function
