"""Write the functions and classes passed to a Python API call to files that every process of the run loads.

    rl(reward=f, tools=[g])  ->  .<experiment>.objects: reward.py and objects.py, each with a pickle
                             ->  overrides that set custom_reward_function.path, env.custom_module, ... to these files

Grader processes, Ray workers and a resumed run load the files like any user module. Code of the user is pickled by
value, so functions from a notebook, a script or a neighboring module need not be importable in these processes.
"""

from __future__ import annotations

import pickle
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from alphaapollo.config.keys import format_override

if TYPE_CHECKING:
    from alphaapollo.algorithms.advantages import Estimator
    from alphaapollo.evolving.roles import Role

LOADER = '''"""Written by the Python API: objects of the call."""

from pathlib import Path

from alphaapollo.cli.python_objects import load_objects

compute_score = run = load_objects(Path(__file__).with_suffix(".pkl"))
'''


@dataclass(frozen=True)
class PythonObjects:
    """Functions and classes passed to a Python API call."""

    reward: Callable[..., object] | None = None  # (prompt, completion) or (prompt, trajectory)
    environment: type | None = None  # implements environments/base.py
    tools: Sequence[Callable[..., object]] = ()  # functions with types and a docstring
    estimator: Callable[..., object] | Estimator | None = None  # (inputs, config) -> Advantages
    roles: Mapping[str, type[Role]] = field(default_factory=dict)  # role name -> class as in evolving/roles.py
    agent: Callable[..., object] | None = None  # run(task, endpoint)
    uses_reward: bool = False  # whether a reward function scores the episodes of `environment`

    def pickle_and_make_overrides(self, folder: Path) -> list[str]:
        """Pickle the objects into files. Returns overrides that load them, e.g. `env.custom_module=.../objects.py`."""
        words: list[str] = []
        if self.reward is not None:  # graders load only this file
            path = _pickle_objects(PythonObjects(self.reward), folder / "reward.py")
            words += [format_override("custom_reward_function.path", path), "custom_reward_function.name=compute_score"]
        if self.agent is not None:
            path = _pickle_objects(PythonObjects(agent=self.agent), folder / "agent.py")
            words += ["env.env_name=agent", format_override("env.agent.path", path)]
            words += ["env.agent.grade=true"] if self.reward is not None else []
        others = replace(self, reward=None, agent=None, uses_reward=self.reward is not None)
        if not (self.environment or self.tools or self.estimator or self.roles):
            return words
        path = _pickle_objects(others, folder / "objects.py")
        if self.environment is not None or self.tools:
            words.append(format_override("env.custom_module", path))
        if self.environment is not None:
            words.append(format_override("env.env_name", self.environment.__name__))
        if self.tools:
            words.append(format_override("env.tools", [function.__name__ for function in self.tools]))
        if self.estimator is not None:
            name = getattr(self.estimator, "name", None) or self.estimator.__name__  # type: ignore[union-attr]
            words.append(format_override("algorithm.custom_module", path))
            words.append(format_override("algorithm.adv_estimator", name))
        if self.roles:
            words.append(format_override("evolving.custom_module", path))
            words += [format_override(f"roles.{slot}.plugin", role.__name__) for slot, role in self.roles.items()]
        return words


def _pickle_objects(objects: PythonObjects, loader_file: Path) -> str:
    """Write `loader_file`, which loads the pickled objects; return its path. Raises ValueError if pickling fails."""
    import cloudpickle  # type: ignore[import-untyped]

    parts = [
        objects.reward,
        objects.agent,
        objects.environment,
        *objects.tools,
        objects.estimator,
        *objects.roles.values(),
    ]
    names = {getattr(getattr(part, "fn", part), "__module__", None) for part in parts}
    user_modules = [sys.modules[name] for name in names if name in sys.modules and is_user_module(sys.modules[name])]
    for module in user_modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(objects)
    except (TypeError, pickle.PicklingError, RecursionError, AttributeError) as error:
        raise ValueError(
            f"the {loader_file.stem} passed to the Python API must be picklable, because the run's other processes use "
            f"it ({error}). Create locks, connections and file objects inside the function."
        ) from error
    finally:
        for module in user_modules:
            cloudpickle.unregister_pickle_by_value(module)
    loader_file.parent.mkdir(parents=True, exist_ok=True)
    loader_file.with_suffix(".pkl").write_bytes(pickled)
    loader_file.write_text(LOADER, encoding="utf-8")
    return str(loader_file)


def is_user_module(module: ModuleType) -> bool:
    """Return whether a module is user code that must be registered with cloudpickle; false for __main__."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ in ("__main__", "builtins") or module.__name__.startswith("alphaapollo."):
        return False
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not any(Path(file).resolve().is_relative_to(folder.resolve()) for folder in installed)


def load_objects(pickle_file: Path) -> Any:
    """Load the objects of an API call, register them by name in this process, and return the agent or the reward
    function."""
    objects: PythonObjects = pickle.loads(pickle_file.read_bytes())
    if objects.environment is not None or objects.tools:
        from alphaapollo.environments.base import register_environment
        from alphaapollo.tools.base import tools as known
        from alphaapollo.tools.function_tool import tool

        for function in objects.tools:
            if function.__name__ not in known:  # already registered if its module was pickled and uses @tool
                tool(function)
        if objects.environment is not None:
            register_environment(objects.environment.__name__, graded=objects.uses_reward)(objects.environment)
    if objects.estimator is not None:
        from alphaapollo.algorithms.advantages import Estimator, register_estimator

        estimator = objects.estimator
        declared = estimator if isinstance(estimator, Estimator) else Estimator(estimator.__name__, estimator)
        declarations = {name: value for name, value in vars(declared).items() if name not in ("name", "fn")}
        register_estimator(declared.name, **declarations)(declared.fn)
    if objects.roles:
        from alphaapollo.evolving.roles import register_role

        for role in dict.fromkeys(objects.roles.values()):
            register_role(role.__name__)(role)
    return objects.agent or objects.reward
