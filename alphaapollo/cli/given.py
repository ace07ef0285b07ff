"""Functions and classes that a Python program gives to a run, as the files that every process of the run reads.

    rl(reward=f, tools=[g])  ->  .<experiment>.objects: reward, environment, ...: a module and a pickle each, by the run
                             ->  custom_reward_function.path, env.custom_module, ...: the keys for a user's own files

So grader processes, workers of Ray and a resume find them as they find a file of the user's. What is pickled goes by
value, but for packages that are installed: a notebook's cells, a script, and modules beside it need not be there.
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

from alphaapollo.config.overrides import format_override

if TYPE_CHECKING:
    from alphaapollo.algorithms.advantages import Estimator
    from alphaapollo.evolving.roles import Role

LOADER = '''"""Written by alphaapollo.{program}: what it was given as {what}."""

from pathlib import Path

from alphaapollo.cli.given import {loader}

{name} = {loader}(Path(__file__).with_suffix(".pkl"))
'''


@dataclass(frozen=True)
class Given:
    """What a call was given besides its configuration."""

    reward: Callable[..., Any] | None = None  # (prompt, completion) or (prompt, trajectory)
    environment: type | None = None  # of the protocol in environments/base.py
    tools: Sequence[Callable[..., Any]] = ()  # functions with types and a docstring
    estimator: Callable[..., Any] | Estimator | None = None  # (inputs, config) -> Advantages
    roles: Mapping[str, type[Role[Any]]] = field(default_factory=dict)  # by slot: classes of evolving/roles.py's kind

    def write(self, folder: Path, program: str) -> list[str]:
        """The files that are needed, and the words that name them. ValueError: what cannot be carried over."""
        words: list[str] = []

        def add(name: str, what: str, loader: str, content: Any, result: str = "loaded") -> str:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.pkl").write_bytes(carried(content, what))
            text = LOADER.format(program=program, what=what, loader=loader, name=result)
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
            return str(folder / f"{name}.py")

        if self.reward is not None:
            path = add("reward", "reward", "load", self.reward, "compute_score")
            words += [format_override("custom_reward_function.path", path), "custom_reward_function.name=compute_score"]
        if self.environment is not None or self.tools:
            played = (self.environment, tuple(self.tools), self.reward is not None)
            words.append(format_override("env.custom_module", add("environment", "environment and tools", "load_played", played)))
        if self.environment is not None:
            words.append(format_override("env.env_name", self.environment.__name__))
        if self.tools:
            words.append(format_override("env.tools", [one.__name__ for one in self.tools]))
        if self.estimator is not None:
            path = add("algorithm", "estimator", "load_estimator", self.estimator)
            name = getattr(self.estimator, "name", None) or self.estimator.__name__  # type: ignore[union-attr]
            words += [format_override("algorithm.custom_module", path), format_override("algorithm.adv_estimator", name)]
        if self.roles:
            path = add("roles", "roles", "load_roles", tuple(dict.fromkeys(self.roles.values())))
            words.append(format_override("evolving.custom_module", path))
            words += [format_override(f"roles.{slot}.plugin", role.__name__) for slot, role in self.roles.items()]
        return words


def carried(content: Any, what: str) -> bytes:
    """Pickled, with the user's own modules by value. ValueError: it cannot be pickled."""
    import cloudpickle  # type: ignore[import-untyped]

    own = [module for module in _modules_of(content) if is_the_users(module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(content)
    except (TypeError, pickle.PicklingError, RecursionError, AttributeError) as error:
        raise ValueError(
            f"{what}: it cannot be carried to the processes of the run ({error}). What it uses must be picklable: open "
            "files, locks and connections where it runs."
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _modules_of(content: Any) -> set[ModuleType]:
    """Where the parts were defined."""
    parts = content if isinstance(content, tuple) else (content,)
    flat = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    named = {getattr(getattr(one, "fn", one), "__module__", None) for one in flat}
    return {sys.modules[name] for name in named if name in sys.modules}


def is_the_users(module: ModuleType) -> bool:
    """Not installed, not Python's, not ours, and not __main__, which goes by value anyway."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ in ("__main__", "builtins") or module.__name__.startswith("alphaapollo."):
        return False
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not any(Path(file).resolve().is_relative_to(folder.resolve()) for folder in installed)


# in the processes of the run


def load(file: Path) -> Any:
    """What `carried` pickled."""
    return pickle.loads(file.read_bytes())


def load_played(file: Path) -> None:
    """Register the environment and the tools."""
    from alphaapollo.environments.base import register_environment
    from alphaapollo.tools.base import tools as known
    from alphaapollo.tools.function_tool import tool

    environment, functions, graded = load(file)
    for function in functions:
        if function.__name__ not in known:  # it is, where its own module came along and says @tool
            tool(function)
    if environment is not None:
        register_environment(environment.__name__, graded=graded)(environment)


def load_estimator(file: Path) -> None:
    """Register it: a function under its name, with the options of an `Estimator` where it is one."""
    from dataclasses import fields

    from alphaapollo.algorithms.advantages import Estimator, register_estimator

    given = load(file)
    if not isinstance(given, Estimator):
        register_estimator(given.__name__)(given)
        return
    options = {field.name: getattr(given, field.name) for field in fields(given) if field.name not in ("name", "fn")}
    register_estimator(given.name, **options)(given.fn)


def load_roles(file: Path) -> None:
    """Register them, by the names of their classes."""
    from alphaapollo.evolving.roles import register_role

    for role in load(file):
        register_role(role.__name__)(role)
