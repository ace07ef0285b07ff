"""What a reward function is, which one grades a data source, and what its answer means.

A reward function takes `(prompt, completion)`, or `(prompt, trajectory)`: by the name of its second parameter it gets
the text that is graded, or the whole episode (see `types.Episode`). It returns
  * a number: the reward, or
  * a dict of named numbers: `reward` is the total if it is there, else the total is their sum; the other names are
    components, shown in metrics and used by filters (`accuracy`), or
  * a `Score`, which can also say that an answer could not be read, or that grading failed, and why.
Whatever else it returns or raises is a failure with a reason, never a reward of 0.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sized
from numbers import Real
from typing import Any, TypeVar

from alphaapollo.types import Episode, Outcome, Prompt, Score

RewardResult = float | Mapping[str, float] | Score
RewardFunction = Callable[[Prompt, str], RewardResult]
ResultT = TypeVar("ResultT")


LARGEST = 1e9  # of a reward: its square, summed over a batch, is still a number in float32


def to_score(result: object) -> Score:
    """What a reward function returned, as a Score.

    Raises:
        ValueError: NaN or infinite. TypeError: not a number, dict of numbers or Score.
    """
    if isinstance(result, Score) and result.outcome.failed:
        return failure(result.reason)
    if isinstance(result, Score):
        components = {name: to_number(value, f"component {name!r}") for name, value in result.components.items()}
        return Score(to_number(result.reward, "the reward"), components, result.outcome, result.reason)
    if not isinstance(result, Mapping):
        return Score(to_number(result, "the reward"))
    if not result:
        raise ValueError("the reward function returned an empty dict")
    parts = {str(name): to_number(value, f"component {name!r}") for name, value in result.items()}
    if "reward" in parts:
        return Score(parts.pop("reward"), parts)
    return Score(math.fsum(parts.values()), parts)


def to_number(value: object, what: str) -> float:
    """What a reward function or component gave as one number; `what` names it (errors as to_score's)."""
    if hasattr(value, "item"):  # a NumPy number, or a tensor or array
        with contextlib.suppress(ValueError, RuntimeError):  # of several: refused below
            value = value.item()
    if not isinstance(value, Real):
        length = f" of length {len(value)}" if isinstance(value, Sized) and not isinstance(value, str) else ""
        raise TypeError(
            f"{what} is a {type(value).__name__}{length}; a reward function returns one number, or a dict of named "
            "numbers, for one completion"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:  # nan, too
        raise ValueError(f"{what} is {number:g}; a number from -{LARGEST:g} to {LARGEST:g} is wanted")
    return number


def failure(reason: str) -> Score:
    """A grader's failure: no reward, to be masked."""
    return Score(math.nan, outcome=Outcome.GRADER_FAILED, reason=reason)


def takes_trajectory(function: Callable[..., Any]) -> bool:
    """Whether its second parameter is named `trajectory`."""
    return list(inspect.signature(function).parameters)[1:2] == ["trajectory"]


def on_episodes(function: Callable[[Prompt, Any], ResultT]) -> Callable[[Prompt, Episode], ResultT]:
    """The function of an episode, which it gets whole if it takes a trajectory, else as its text."""
    return function if takes_trajectory(function) else lambda prompt, episode: function(prompt, episode.text)
