"""The user's own reward function: found, imported and checked, with errors that show the line to mend."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

from alphaapollo.rewards.base import RewardFunction
from alphaapollo.rewards.protocol import HEADER, READY, READY_FOR_TURNS, Grading, worker_command, worker_environment

IMPORT_TIMEOUT = 120.0  # seconds


def check_grading(grading: Grading) -> None:
    """Start-up check of what is the user's own in it, in a process of its own (its imports stay out of ours).

    Raises:
        ValueError: no such file, it does not import (with the line), no function of that name in it, one that does not
            take (prompt, completion) or (prompt, trajectory), or components that are not known.
    """
    path = grading.path or grading.module
    try:
        done = subprocess.run(
            worker_command(grading),
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=IMPORT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{path}: importing it takes more than {IMPORT_TIMEOUT:g} s.") from error
    message = done.stdout[HEADER.size :]
    if message not in (READY, READY_FOR_TURNS):
        ended = f"{path}: importing it ended the process with exit code {done.returncode}."
        raise ValueError(message.decode() or ended)


def load_reward_function(path: str, name: str) -> RewardFunction:
    """Import the function here, in the grader's process (errors as in check_grading)."""
    module = import_file(path, "custom_reward_function.path")
    function = getattr(module, name, None)
    if function is None:
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"{path}: has no function {name!r}; it defines {', '.join(defined) or 'none'}. Set "
            "custom_reward_function.name."
        )
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ValueError(f"{path}: {name} is {kind}; write a plain `def {name}(prompt, completion)`.")
    signature = inspect.signature(function)
    try:
        signature.bind("prompt", "completion")
    except TypeError as error:
        raise ValueError(
            f"{path}: {name}{signature} must take (prompt, completion) or (prompt, trajectory): {error}. The "
            "ground truth is prompt.ground_truth, other columns are in prompt.extra_info."
        ) from error
    checked: RewardFunction = function
    return checked


def import_file(given: str, key: str) -> ModuleType:
    """Import the file that the configuration gives under `key` (errors as in check_grading)."""
    path = Path(given).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{given}: no such file ({key}; working folder: {Path.cwd()}).")
    spec = importlib.util.spec_from_file_location(key.split(".")[0] + "_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: {key} must be a Python file (.py).")
    sys.path += [str(path.parent), str(Path.cwd())]  # at the end: they can shadow nothing
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: does not import: {describe(error, path)}") from error
    return module


def describe(error: Exception, path: Path | None = None) -> str:
    """The error in one line, with the last line of the file `path` on its way, or else of any file."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if frame.filename == str(path)] or frames)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}: {frame.line})"
