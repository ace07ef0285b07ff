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
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypeVar

from alphaapollo.config.schema import Reward
from alphaapollo.types import Episode, Outcome, Prompt, Score

RewardResult = float | Mapping[str, float] | Score
RewardFunction = Callable[[Prompt, str], RewardResult]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Grader:
    """A built-in reward function: `grade` in a module that is imported only where it grades."""

    name: str
    module: str
    patterns: tuple[str, ...]  # of data sources, lower case; the first grader that matches takes it
    function: str = "grade"
    judges: bool = False  # `function` makes the reward function from reward.judge; ground truths may be missing


LARGEST = 1e9  # of a reward: its square, summed over a batch, is still a number in float32

GRADERS = (
    Grader("gsm8k", "alphaapollo.rewards.gsm8k", ("*gsm8k*", "*svamp*")),
    Grader("exact", "alphaapollo.rewards.exact", ("exact", "exact/*")),
    Grader("reasoning_gym", "alphaapollo.rewards.reasoning_gym", ("reasoning_gym", "reasoning_gym/*")),
    Grader("judge", "alphaapollo.rewards.judge", ("judge", "judge/*"), "make", judges=True),
    Grader("search_f1", "alphaapollo.rewards.search", ("search_f1", "search_f1/*"), "grade_f1"),
    Grader(
        "search",
        "alphaapollo.rewards.search",
        ("search", "search/*", "nq", "nq/*", "*nq_open*", "*trivia*qa*", "*popqa*", "*hotpot*", "*musique*", "*squad*"),
    ),
    Grader(
        "multiple_choice",
        "alphaapollo.rewards.multiple_choice",
        ("multiple_choice", "multiple_choice/*", "*mmlu*", "*gpqa*", "*ai2_arc*", "*commonsense_qa*", "*medqa*"),
    ),
    Grader(
        "code",
        "alphaapollo.rewards.code",
        ("code", "code/*", "*humaneval*", "*mbpp*", "*livecodebench*", "*code_contests*", "*/apps", "*taco*"),
    ),
    Grader(
        "math",
        "alphaapollo.rewards.maths",
        ("*math*", "*aime*", "*amc*", "*hmmt*", "*olympiad*", "*minerva*", "*numina*", "*deepscaler*", "*dapo*"),
    ),
)


def find_grader(data_source: str) -> Grader:
    """The built-in grader of a data source, e.g. `openai/gsm8k`, `DigitalLearningGmbH/MATH-lighteval`, `exact`.

    Raises:
        ValueError: none; lists the known ones.
    """
    if (grader := _match(data_source)) is not None:
        return grader
    known = "; ".join(f"{grader.name}: {', '.join(grader.patterns)}" for grader in GRADERS)
    got = f"data_source {data_source!r}" if data_source else "rows without a data_source"
    raise ValueError(
        f"no reward function for {got}. Known patterns: {known}. Write a data_source that matches one, or give your "
        "own function with custom_reward_function.path and .name."
    )


def _match(data_source: str) -> Grader | None:
    """The first built-in grader that takes a data source."""
    matching = (one for one in GRADERS if any(fnmatchcase(data_source.lower(), pattern) for pattern in one.patterns))
    return next(matching, None)


def is_gradable(prompt: Prompt) -> bool:
    """Has a built-in grader all that it needs of this prompt?"""
    grader = _match(prompt.data_source)
    return grader is not None and (grader.judges or prompt.ground_truth is not None)


def is_judged(data_source: str) -> bool:
    """Does a language model grade it, where no function of the user's does?"""
    grader = _match(data_source)
    return grader is not None and grader.judges


def get_reward(data_source: str, judge: Mapping[str, Any] | None = None) -> RewardFunction:
    """The built-in reward function of a data source; imports what it needs.

    Args:
        judge: the fields of reward.judge, for a data source that is judged.

    Raises:
        ValueError: no grader takes the data source, or the judge cannot judge.
    """
    grader = find_grader(data_source)
    function = getattr(importlib.import_module(grader.module), grader.function)
    grade: RewardFunction = function(judge or {}) if grader.judges else function
    return grade


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Start-up check: every data source has a built-in grader (ValueError: names the first that has none)."""
    for data_source in sorted(set(data_sources)):
        find_grader(data_source)


def check_judge(data_sources: Iterable[str], reward: Reward) -> None:
    """Start-up check: where a data source is judged, there is a judge, and time for it (ValueError: which key)."""
    judged = sorted({source for source in data_sources if find_grader(source).judges})
    if judged and not reward.judge.model:
        raise ValueError(f"data_source {judged[0]!r} is graded by a judge: set reward.judge.model (and .base_url).")
    if judged and reward.timeout <= reward.judge.timeout:
        raise ValueError(
            f"reward.timeout={reward.timeout:g} ends before reward.judge.timeout={reward.judge.timeout:g}, which is "
            "the time of one request: make it larger, with room for retries."
        )


def check_gradable(prompts: Iterable[Prompt]) -> None:
    """Start-up check: the built-in graders can grade every prompt.

    Raises:
        ValueError: a data source has no grader, or a prompt has no ground truth (names the first).
    """
    prompts = list(prompts)
    check_data_sources({prompt.data_source for prompt in prompts})
    needing = [prompt for prompt in prompts if not find_grader(prompt.data_source).judges]
    if without := [prompt.id for prompt in needing if prompt.ground_truth is None]:
        raise ValueError(
            f"{len(without)} of {len(prompts)} prompts have no ground truth, the first is row {without[0]}: built-in "
            "graders need reward_model.ground_truth. Add it, or give your own custom_reward_function.path and .name."
        )


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
