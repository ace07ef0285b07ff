"""Objects that a user passes to the Python API, as files that every process of a run can load:

    rl(reward=f, tools=[g])  ->  .<experiment>.objects: reward.py and objects.py, each with a pickle
                             ->  overrides that set custom_reward_function.path, env.custom_module, ... to these files

Grader processes, Ray workers and a resumed run load the files like any user module. Code of the user is pickled by
value, so functions from a notebook, a script or a neighboring module need not be importable in these processes.
"""

from __future__ import annotations

import inspect
import pickle
import pkgutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from alphaapollo.config.keys import format_override

Registration = tuple[str, str, Mapping[str, object], object]
"""Function in alphaapollo that makes a decorator, its arguments, and the object that the decorator registers."""
LOADER = '''"""Written by the Python API: objects of the call."""

from alphaapollo.user_objects import load_objects

compute_score = run = load_objects(__file__)
'''


def write_objects(
    folder: Path,
    reward: Callable[..., object] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., object]] = (),
    estimator: object = None,
    agent: Callable[..., object] | None = None,
    more: Sequence[Registration] = (),
    more_settings: Mapping[str, object] = {},
    module_key: str = "",
) -> list[str]:
    """Pickle the objects of an API call (e.g. `rl`) into files. Returns overrides that load them, e.g.
    `env.custom_module=.../objects.py`. Raises ValueError if an object cannot be pickled.

    more, more_settings: objects of a plug-in, and {key: value} that selects them. module_key: key of their file."""
    values, registrations, path = dict(more_settings), [*more], str(folder / "objects.py")
    values |= {module_key: path} if more else {}
    object_rewards: list[Callable[..., object]] = []  # reward functions that read the environments of the episodes
    if environment and reward and "environments" in inspect.signature(reward).parameters:
        object_rewards, reward = [reward], None
    if reward:  # graders load only this file
        values["custom_reward_function.path"] = _write_pickle(folder / "reward.py", reward, [reward])
        values["custom_reward_function.name"] = "compute_score"
    if agent:
        values |= {"env.env_name": "agent", "env.agent.path": _write_pickle(folder / "agent.py", agent, [agent])}
        values |= {"env.agent.grade": True} if reward else {}
    if environment and not isinstance(environment, type):
        raise ValueError(
            f"environment= is a {type(environment).__name__}. Pass a class. For a factory, name its file in "
            "env.custom_module (docs/environments.md#classes-of-other-frameworks)."
        )
    if environment:
        options = {"graded": bool(reward), "rewards": object_rewards}
        register = "environments.classes:register_environment_object"
        registrations.append((register, environment.__name__, options, environment))
        values |= {"env.custom_module": path, "env.env_name": environment.__name__}
    if tools:
        registrations += [("user_objects:find_tool_decorator", tool.__name__, {}, tool) for tool in tools]
        values |= {"env.custom_module": path, "env.tools": [tool.__name__ for tool in tools]}
    if estimator:
        of_function = {"name": getattr(estimator, "__name__", ""), "fn": estimator}
        fields: dict[str, Any] = dict(vars(estimator)) if hasattr(estimator, "fn") else of_function
        name, function = fields.pop("name"), fields.pop("fn")
        registrations.append(("algorithms.advantages:register_estimator", name, fields, function))
        values |= {"algorithm.custom_module": path, "algorithm.adv_estimator": name}
    if registrations:
        _write_pickle(Path(path), registrations, [*object_rewards, *(value for *_, value in registrations)])
    return [format_override(key, value) for key, value in values.items()]


def _write_pickle(loader_file: Path, content: object, objects: Sequence[object]) -> str:
    """Write `loader_file`, which loads the pickled content; return its path. User modules of `objects` are included."""
    pickled = pickle_by_value(loader_file.stem, content, objects)
    loader_file.parent.mkdir(parents=True, exist_ok=True)
    loader_file.with_suffix(".pkl").write_bytes(pickled)
    loader_file.write_text(LOADER, encoding="utf-8")
    return str(loader_file)


def pickle_by_value(name: str, content: object, objects: Sequence[object]) -> bytes:
    """Pickle objects with the user's code that they need, so that other processes need not import it. name: what the
    ValueError calls the objects if they cannot be pickled."""
    import cloudpickle  # type: ignore[import-untyped]

    modules = {sys.modules.get(getattr(value, "__module__", "")) for value in objects}
    user_modules = [module for module in modules if module and is_user_module(module)]
    for module in user_modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(content)
        return pickled
    except (TypeError, pickle.PicklingError, RecursionError, AttributeError) as error:
        raise ValueError(
            f"the {name} passed to the Python API must be picklable, because the run's other processes use "
            f"it ({error}). Create locks, connections and file objects inside the function."
        ) from error
    finally:
        for module in user_modules:
            cloudpickle.unregister_pickle_by_value(module)


def is_user_module(module: ModuleType) -> bool:
    """Return whether a module is code of the user, neither of the standard library nor of an installed package."""
    file = getattr(module, "__file__", None) or ""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    is_excluded = module.__name__.startswith(("alphaapollo.", "__main__"))
    return bool(file) and not file.startswith(installed) and not is_excluded


def load_objects(loader_file: str) -> object:
    """Load the objects of an API call in a process of the run: return a reward function or agent, register others."""
    content = pickle.loads(Path(loader_file).with_suffix(".pkl").read_bytes())
    if isinstance(content, list):
        for register, name, options, value in content:
            pkgutil.resolve_name(f"alphaapollo.{register}")(name, **options)(value)
    return content


def find_tool_decorator(name: str) -> Callable[..., object]:
    """Return the decorator that registers a tool, or a function without effect if the tool is registered already."""
    from alphaapollo.tools.base import tools
    from alphaapollo.tools.function_tool import tool

    return repr if name in tools else tool
