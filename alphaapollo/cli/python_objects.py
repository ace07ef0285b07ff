"""Write functions and classes given to the Python API to files that every process of the run loads.

    rl(reward=f, tools=[g])  ->  .<experiment>.objects: reward, environment, ...: a module and a pickle each
                             ->  custom_reward_function.path, env.custom_module, ...: the keys of user modules

Grader processes, Ray workers and a resumed run load them like any user module. Objects are pickled by value unless they
belong to installed packages, so notebook cells, scripts and neighboring modules need not be importable.
"""

from __future__ import annotations

import pickle
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from alphaapollo.config.keys import format_override

if TYPE_CHECKING:
    from alphaapollo.algorithms.advantages import Estimator
    from alphaapollo.evolving.roles import Role

LOADER = '''"""Written by alphaapollo.{program}: the {what} it was called with."""

from pathlib import Path

from alphaapollo.cli.python_objects import {loader}

{name} = {loader}(Path(__file__).with_suffix(".pkl"))
'''


@dataclass(frozen=True)
class PythonObjects:
    """Python objects of an API call."""

    reward: Callable[..., Any] | None = None  # (prompt, completion) or (prompt, trajectory)
    environment: type | None = None  # implements environments/base.py
    tools: Sequence[Callable[..., Any]] = ()  # functions with types and a docstring
    estimator: Callable[..., Any] | Estimator | None = None  # (inputs, config) -> Advantages
    roles: Mapping[str, type[Role]] = field(default_factory=dict)  # by slot: classes as in evolving/roles.py

    def write(self, folder: Path, program: str) -> list[str]:
        """Write the files and return the overrides naming them. Raises ValueError for unpicklable objects."""
        words: list[str] = []

        def add(name: str, what: str, loader: str, content: Any, result: str = "loaded") -> str:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.pkl").write_bytes(pickle_by_value(content, what))
            text = LOADER.format(program=program, what=what, loader=loader, name=result)
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
            return str(folder / f"{name}.py")

        if self.reward is not None:
            path = add("reward", "reward", "load", self.reward, "compute_score")
            words += [format_override("custom_reward_function.path", path), "custom_reward_function.name=compute_score"]
        if self.environment is not None or self.tools:
            objects = (self.environment, tuple(self.tools), self.reward is not None)
            words.append(
                format_override(
                    "env.custom_module",
                    add("environment", "environment and tools", "load_environment_and_tools", objects),
                )
            )
        if self.environment is not None:
            words.append(format_override("env.env_name", self.environment.__name__))
        if self.tools:
            words.append(format_override("env.tools", [one.__name__ for one in self.tools]))
        if self.estimator is not None:
            path = add("algorithm", "estimator", "load_estimator", self.estimator)
            name = getattr(self.estimator, "name", None) or self.estimator.__name__  # type: ignore[union-attr]
            words += [
                format_override("algorithm.custom_module", path),
                format_override("algorithm.adv_estimator", name),
            ]
        if self.roles:
            path = add("roles", "roles", "load_roles", tuple(dict.fromkeys(self.roles.values())))
            words.append(format_override("evolving.custom_module", path))
            words += [format_override(f"roles.{slot}.plugin", role.__name__) for slot, role in self.roles.items()]
        return words


def pickle_by_value(content: Any, what: str) -> bytes:
    """Pickle an object, user modules by value. Raises ValueError if it cannot be pickled."""
    import cloudpickle  # type: ignore[import-untyped]

    own = [module for module in _modules_of(content) if is_user_module(module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(content)
    except (TypeError, pickle.PicklingError, RecursionError, AttributeError) as error:
        raise ValueError(
            f"{what} cannot be sent to the processes of the run ({error}). It must be picklable: open files, locks and "
            "connections inside the function."
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _modules_of(content: Any) -> set[ModuleType]:
    """Modules that define the objects."""
    parts = content if isinstance(content, tuple) else (content,)
    flat = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    named = {getattr(getattr(one, "fn", one), "__module__", None) for one in flat}
    return {sys.modules[name] for name in named if name in sys.modules}


def is_user_module(module: ModuleType) -> bool:
    """Whether a module is neither installed nor part of Python or this project, nor __main__ (always by value)."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ in ("__main__", "builtins") or module.__name__.startswith("alphaapollo."):
        return False
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not any(Path(file).resolve().is_relative_to(folder.resolve()) for folder in installed)


# Called in the processes of the run.


def load(file: Path) -> Any:
    """Load an object written by `pickle_by_value`."""
    return pickle.loads(file.read_bytes())


def load_environment_and_tools(file: Path) -> None:
    """Register the environment and the tools."""
    from alphaapollo.environments.base import register_environment
    from alphaapollo.tools.base import tools as known
    from alphaapollo.tools.function_tool import tool

    environment, functions, graded = load(file)
    for function in functions:
        if function.__name__ not in known:  # already registered if its module was pickled and uses @tool
            tool(function)
    if environment is not None:
        register_environment(environment.__name__, graded=graded)(environment)


def load_estimator(file: Path) -> None:
    """Register an estimator function under its name, or an `Estimator` with its options."""
    from dataclasses import fields

    from alphaapollo.algorithms.advantages import Estimator, register_estimator

    estimator = load(file)
    if not isinstance(estimator, Estimator):
        register_estimator(estimator.__name__)(estimator)
        return
    options = {
        field.name: getattr(estimator, field.name) for field in fields(estimator) if field.name not in ("name", "fn")
    }
    register_estimator(estimator.name, **options)(estimator.fn)


def load_roles(file: Path) -> None:
    """Register role classes by name."""
    from alphaapollo.evolving.roles import register_role

    for role in load(file):
        register_role(role.__name__)(role)
