"""The user's own reward function: found and checked before anything starts, and loaded where it grades."""

from __future__ import annotations

import inspect
import subprocess

from alphaapollo.rewards.base import RewardFunction
from alphaapollo.rewards.grader_processes.protocol import (
    HEADER,
    READY,
    READY_FOR_TURNS,
    Grading,
    worker_command,
    worker_environment,
)
from alphaapollo.rewards.verl_signature import from_verl, has_verl_signature
from alphaapollo.utils.user_module import load_user_object

IMPORT_TIMEOUT = 120.0  # seconds


def check_grading(grading: Grading) -> None:
    """Start-up check of what is the user's own in it, in a process of its own (its imports stay out of ours).

    Raises:
        ValueError: as load_reward_function, the import takes too long or ends the process, or components that are not
            known.
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
        killed = f" Something killed it by signal {-done.returncode}: its memory limit, perhaps, or somebody."
        ended = f"{path}: importing it ended the grader's process with exit code {done.returncode}."
        raise ValueError(message.decode() or ended + killed * (done.returncode < 0))


def load_reward_function(path: str, name: str) -> RewardFunction:
    """Import the function here, in the grader's process.

    Raises:
        ValueError: no such file, it does not import (with the line), no function of that name in it, or one that takes
            neither (prompt, completion), nor (prompt, trajectory), nor verl's parameters.
    """
    key, name_key = "custom_reward_function.path", "custom_reward_function.name"
    function = load_user_object(path, name, key, name_key)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ValueError(f"{name_key}: {name} in {path} is {kind}. Write a plain `def {name}(prompt, completion)`.")
    if has_verl_signature(function):
        try:
            return from_verl(function)
        except ValueError as error:
            raise ValueError(f"{name_key}: {path}: {error}") from error
    signature = inspect.signature(function)
    try:
        signature.bind("prompt", "completion")
    except TypeError as error:
        raise ValueError(
            f"{name_key}: {path}: {name}{signature} must take (prompt, completion) or (prompt, trajectory), or verl's "
            f"(data_source, solution_str, ground_truth, extra_info): {error}. The ground truth is prompt.ground_truth, "
            "other columns are in prompt.extra_info."
        ) from error
    checked: RewardFunction = function
    return checked
