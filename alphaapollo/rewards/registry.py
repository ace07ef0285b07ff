"""Built-in reward functions by `data_source`, and the startup checks of a data set against them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from alphaapollo.config.schema import Reward
from alphaapollo.rewards.base import RewardFunction
from alphaapollo.types import Prompt


@dataclass(frozen=True)
class Grader:
    """A built-in reward function: `grade` in a module that is imported only where it grades."""

    name: str
    module: str
    patterns: tuple[str, ...]  # of data sources, lower case; the first grader that matches takes it
    function: str = "grade"
    judges: bool = False  # `function` makes the reward function from reward.judge; ground truths may be missing


GRADERS = (
    Grader("gsm8k", "alphaapollo.rewards.gsm8k", ("*gsm8k*", "*svamp*")),
    Grader("exact", "alphaapollo.rewards.exact_match", ("exact", "exact/*")),
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
        "alphaapollo.rewards.code.grader",
        ("code", "code/*", "*humaneval*", "*mbpp*", "*livecodebench*", "*code_contests*", "*/apps", "*taco*"),
    ),
    Grader(
        "math",
        "alphaapollo.rewards.math.grader",
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
