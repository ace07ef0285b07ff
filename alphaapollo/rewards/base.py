"""Define the result of a reward function and convert it to a Score.

A reward function, sync or async, takes `(prompt, completion)` or `(prompt, trajectory)`, and returns a number, a dict
of named numbers or a `Score` (docs/rewards.md). Any other result and any exception count as a failure with a reason,
never as a reward of 0. A component that is NaN or infinite is left out and counted; the reward must be finite."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Real
from typing import Any, TypeVar

from alphaapollo.types import Episode, Outcome, Prompt, Score, Turn
from alphaapollo.utils.thoughts import insert_marks

RewardResult = float | Mapping[str, float] | Score
RewardFunction = Callable[[Prompt, str], RewardResult]
ResultT = TypeVar("ResultT")

MAX_REWARD = 1e9  # its square, summed over a batch, is still finite in float32


def convert_to_score(result: object) -> Score:
    """Convert the result of a reward function to a Score. Raises TypeError for other types than a number, a dict of
    numbers or a Score, and ValueError for a number that is NaN, infinite or larger than MAX_REWARD."""
    if isinstance(result, Mapping) and "reward" not in result:
        if not result:
            raise ValueError("the reward function returned an empty dict. Return a number or a dict with a number.")
        parts = {str(name): convert_to_float(value, f"component {name!r}") for name, value in result.items()}
        return Score(math.fsum(parts.values()), parts)
    if isinstance(result, Mapping):
        others: dict[str, Any] = {name: value for name, value in result.items() if name != "reward"}
        reward = convert_to_float(result["reward"], "the reward")
        # Score derives an accuracy from the reward only if there are no components.
        accuracy = reward if reward in (0, 1) and "accuracy" not in others else None
        result = Score(reward, others, accuracy=accuracy)
    if not isinstance(result, Score):
        return Score(convert_to_float(result, "the reward"))
    if result.outcome.failed:
        return make_failed_score(result.reason)
    parts = {str(name): _read_number(value, f"component {name!r}") for name, value in result.components.items()}
    finite = {name: float(value) for name, value in parts.items() if abs(value) <= MAX_REWARD}
    skipped = (*result.skipped_components, *(name for name in parts if name not in finite))
    reward = convert_to_float(result.reward, "the reward")
    accuracy = finite.get("accuracy", None if "accuracy" in parts else result.accuracy)
    return Score(reward, finite, result.outcome, result.reason, skipped_components=skipped, accuracy=accuracy)


def convert_to_float(value: object, description: str) -> float:
    """Convert a Python or NumPy number or a one-element tensor to a float. Errors start with `description`."""
    number = _read_number(value, description)
    if not abs(number) <= MAX_REWARD:  # also true for NaN
        valid_range = f"-{MAX_REWARD:g} to {MAX_REWARD:g}"
        raise ValueError(f"{description} is {number!r:.30}. Return a finite number from {valid_range}.")
    return float(number)


def _read_number(value: object, description: str) -> Any:
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # with several elements, raises TypeError below
            value = value.item()
    if not isinstance(value, Real):
        length = f" of length {len(value)}" if isinstance(value, Sized) and not isinstance(value, str) else ""
        raise TypeError(
            f"{description} is a {type(value).__name__}{length}. Return one number, or a dict of named numbers, for "
            "one completion."
        )
    return value


def make_accuracy_score(is_correct: bool) -> Score:
    """Return a score of 1 for a correct answer, else 0. The component `accuracy` has the same value."""
    return Score(float(is_correct), {"accuracy": float(is_correct)})


def make_wrong_format_score(reason: str) -> Score:
    """Return a score of 0 for a completion from which no answer can be read."""
    return Score(0.0, {"accuracy": 0.0}, Outcome.WRONG_FORMAT, reason)


def make_failed_score(reason: str) -> Score:
    """Return the score of a completion whose grader failed: reward NaN, which excludes the trajectory from training."""
    return Score(math.nan, outcome=Outcome.GRADER_FAILED, reason=reason)


def add_marks(text: str, turns: Sequence[Turn]) -> str:
    """Add missing marks of thoughts to a text, if the text is the beginning of the last turn's text."""
    return insert_marks(text, turns[-1].marks) if turns and turns[-1].text.startswith(text) else text


def get_question(prompt: Prompt) -> str:
    """Return what a prompt asks: all user messages of a chat prompt, or the complete text of a text prompt."""
    if isinstance(prompt.content, str):
        return prompt.content
    return "\n\n".join(message["content"] for message in prompt.content if message["role"] == "user")


def takes_trajectory(function: Callable[..., object]) -> bool:
    """Return whether a reward function takes (prompt, trajectory) instead of (prompt, completion)."""
    return list(inspect.signature(function).parameters)[1:2] == ["trajectory"]


def adapt_to_episode(
    function: Callable[[Prompt, Any], ResultT], reads_marks: bool = False
) -> Callable[[Prompt, Episode], ResultT]:
    """Wrap a reward function to take (prompt, episode). A function of completions gets the episode's text or, with
    reads_marks, the text with all marks of its thoughts."""
    if takes_trajectory(function):
        return function
    return lambda prompt, episode: function(prompt, (episode.marked_text if reads_marks else "") or episode.text)


def is_async(function: Callable[..., object]) -> bool:
    """Return whether calling a function, or an object with `__call__`, gives an awaitable."""
    call = getattr(function, "__call__", None)  # noqa: B004 the method itself is inspected
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
