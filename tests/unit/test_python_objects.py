from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from alphaapollo.algorithms.advantages import AdvantageInputs, Advantages, Estimator, get_estimator
from alphaapollo.config.schema import Algorithm
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.processes.python_command import make_subprocess_environ
from alphaapollo.tools.base import tools
from alphaapollo.types import Prompt
from alphaapollo.user_objects import is_user_module, write_objects
from alphaapollo.utils.user_module import load_user_module
from tests.unit.registries import names_of_one_test as names_of_one_test

BONUS = 0.5


def likes_seven(prompt: Prompt, completion: str) -> dict[str, float]:
    return {"reward": completion.count("7") + BONUS, "accuracy": 1.0}


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: any.
    """
    return 2 * number


class Riddle:
    def __init__(self, services: object):
        self.services = services

    def reset(self, prompt: Prompt) -> str:
        return "?"

    def step(self, action: str) -> object:
        return None

    def close(self) -> None: ...


def my_advantages(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    values = inputs.mask * inputs.scores.unsqueeze(1)
    return Advantages(values, values)


def keys(words: list[str]) -> dict[str, str]:
    return {word.partition("=")[0]: word.partition("=")[2].strip("'") for word in words}


def test_reward_loads_without_its_module(tmp_path: Path) -> None:
    """The function and the names it uses work in a process that cannot import this file."""
    given = keys(write_objects(tmp_path, reward=likes_seven))
    code = f"""
import sys
from alphaapollo.config.schema import CustomRewardFunction
from alphaapollo.rewards.custom import load_reward_function
from alphaapollo.types import Prompt
grade = load_reward_function(CustomRewardFunction(path={given["custom_reward_function.path"]!r})).function
assert grade(Prompt(0, "x", "q"), "77") == {{"reward": 2.5, "accuracy": 1.0}}
assert not [name for name in sys.modules if "test_python_objects" in name]
assert "torch" not in sys.modules
"""
    command, environ = [sys.executable, "-c", code], make_subprocess_environ()
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_environment_and_tools_are_registered_by_their_names(tmp_path: Path) -> None:
    given = keys(write_objects(tmp_path, reward=likes_seven, environment=Riddle, tools=[double]))
    assert (given["env.env_name"], given["env.tools"]) == ("Riddle", "['double']")
    load_user_module(given["env.custom_module"], "env.custom_module")
    registered = get_environment_spec("Riddle")
    assert registered.graded
    assert registered.factory(None).reset(Prompt(0, "x", "q")) == "?"  # type: ignore[arg-type]
    assert tools.get("double")().description == "Twice a number."


def test_estimator_gets_its_declared_inputs(tmp_path: Path) -> None:
    declared = Estimator("with_values", my_advantages, needs=("values",))
    for name, estimator, needs in (("my_advantages", my_advantages, ()), ("with_values", declared, ("values",))):
        given = keys(write_objects(tmp_path / name, estimator=estimator))
        assert given["algorithm.adv_estimator"] == name
        load_user_module(given["algorithm.custom_module"], "algorithm.custom_module")
        assert get_estimator(name).needs == needs


def test_no_objects_write_no_files(tmp_path: Path) -> None:
    assert write_objects(tmp_path / "objects") == []
    assert not (tmp_path / "objects").exists()


def test_unpicklable_objects_are_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"the reward .*picklable"):
        write_objects(tmp_path, lambda prompt, completion: float(lock.locked()))


def test_modules_pickled_by_value() -> None:
    assert is_user_module(sys.modules[__name__])
    assert not any(is_user_module(sys.modules[name]) for name in ("json", "pytest", "alphaapollo.types"))
