"""Load the user's reward function (`custom_reward_function`), also one that is written for another framework.

A function has the parameters (prompt, completion), (prompt, trajectory), or those of a contract (contracts.py). It may
be async. The name may also be that of a class of ms-swift, or a list of names.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from alphaapollo.config.schema import CustomRewardFunction
from alphaapollo.rewards.base import explain_signature_mismatch, is_async
from alphaapollo.rewards.contracts import (
    OPENRLHF,
    SWIFT,
    TRL,
    VERL_NAMES,
    adapt_function,
    add_functions,
    find_contract,
    list_required_columns,
    make_remote_function,
)
from alphaapollo.utils.user_module import load_user_module, load_user_object

PATH_KEY, NAME_KEY = "custom_reward_function.path", "custom_reward_function.name"
SWIFT_MODULES = ("swift", "swift.rewards", "swift.plugin", "swift.plugin.orm", "swift.utils")


@dataclass(frozen=True)
class LoadedFunction:
    """The user's reward function, or the weighted sum of several."""

    function: Callable[..., Any]  # takes a prompt, and a completion or a trajectory
    is_async: bool = False  # whether it returns awaitables
    columns: tuple[str, ...] = ()  # columns of the data that it requires
    takes_prompt_text: bool = False  # whether it reads the rendered prompt


def load_reward_function(custom: CustomRewardFunction) -> LoadedFunction:
    """Import the user's reward function. Raises ValueError if the file or the function is missing, the import fails
    (the message names the line), or the function has the parameters of no contract."""
    if custom.is_remote:
        return LoadedFunction(make_remote_function(custom.path), is_async=True, takes_prompt_text=True)
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
    path, function = custom.path, _load_object(custom.path, name)
    contract, columns, reason = None, list[str](), ""
    if is_class := isinstance(function, type):
        reason = explain_signature_mismatch(function)
        function = function if reason else function()
    if not callable(function):
        kind = f"a {type(function).__name__}"
        raise ValueError(f"{NAME_KEY}: {name} in {path} is {kind}. Define it as `def {name}(prompt, completion)`.")
    if not reason and (contract := find_contract(function)) is not None:
        contract = SWIFT if is_class and contract is TRL else contract
        columns = list_required_columns(function, contract, custom.reward_kwargs)
        given = [*contract.names, *columns, *custom.reward_kwargs]
        names = inspect.signature(function).parameters
        reason = explain_signature_mismatch(function, **dict.fromkeys(one for one in given if one in names))
    elif not reason:
        reason = explain_signature_mismatch(function, "prompt", "completion")
    if reason:
        raise ValueError(
            f"{NAME_KEY}: {path}: {name}{inspect.signature(function)} has unsupported parameters ({reason}). Use "
            f"(prompt, completion), (prompt, trajectory), or those of verl, ({', '.join(VERL_NAMES)}), TRL, "
            "(completions, **kwargs), or OpenRLHF, (queries, prompts, labels). The ground truth is "
            "prompt.ground_truth; other columns are in prompt.extra_info."
        )
    adapted = adapt_function(function, contract, custom.reward_kwargs) if contract else function
    return LoadedFunction(adapted, is_async(function), tuple(columns), contract is OPENRLHF)


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

    names = {"ORM": ORM, "AsyncORM": ORM, "orms": {}, "get_logger": logging.getLogger}
    for name in SWIFT_MODULES:
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(names, __path__=[])
