"""Built-in graders by `data_source`, and the startup check that they can grade a data set."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from alphaapollo.config.schema import Judge, Reward
from alphaapollo.rewards.base import RewardFunction
from alphaapollo.types import Prompt


@dataclass(frozen=True)
class BuiltInGrader:
    """Built-in reward function and the data sources that it grades. Only grader processes import its module."""

    name: str
    function: str  # "module:function" under alphaapollo.rewards
    data_source_patterns: str  # patterns of data sources, lower case; the first matching grader is used
    is_judge: bool = False  # `function` creates the reward function from reward.judge; ground truths are optional


GRADERS = (
    BuiltInGrader("gsm8k", "gsm8k:grade", "*gsm8k* *svamp*"),
    BuiltInGrader("exact", "exact_match:grade", "exact exact/*"),
    BuiltInGrader("reasoning_gym", "reasoning_gym:grade", "reasoning_gym reasoning_gym/*"),
    BuiltInGrader("judge", "judge:make_judge_function", "judge judge/*", is_judge=True),
    BuiltInGrader("search_f1", "search:grade_f1", "search_f1 search_f1/*"),
    BuiltInGrader(
        "search", "search:grade", "search search/* nq nq/* *nq_open* *trivia*qa* *popqa* *hotpot* *musique* *squad*"
    ),
    BuiltInGrader(
        "multiple_choice",
        "multiple_choice:grade",
        "multiple_choice multiple_choice/* *mmlu* *gpqa* *ai2_arc* *commonsense_qa* *medqa*",
    ),
    BuiltInGrader(
        "code", "code.grader:grade", "code code/* *humaneval* *mbpp* *livecodebench* *code_contests* */apps *taco*"
    ),
    BuiltInGrader(
        "math", "math.grader:grade", "*math* *aime* *amc* *hmmt* *olympiad* *minerva* *numina* *deepscaler* *dapo*"
    ),
)


def find_grader(data_source: str) -> BuiltInGrader | None:
    """Return the first built-in grader with a pattern that matches the data source; None if no pattern matches."""
    name = data_source.lower()
    matching = (
        one for one in GRADERS if any(fnmatchcase(name, pattern) for pattern in one.data_source_patterns.split())
    )
    return next(matching, None)


def get_grader(data_source: str) -> BuiltInGrader:
    """Return the built-in grader of a data source, e.g. `openai/gsm8k`. Raises ValueError if no pattern matches."""
    if (grader := find_grader(data_source)) is not None:
        return grader
    known = "; ".join(f"{grader.name}: {', '.join(grader.data_source_patterns.split())}" for grader in GRADERS)
    got = f"data_source {data_source!r}" if data_source else "rows without a data_source"
    raise ValueError(
        f"no reward function for {got}. Use a data_source that matches a known pattern, or set "
        f"custom_reward_function.path and .name. Known patterns: {known}."
    )


def load_grader(data_source: str, judge: Judge) -> RewardFunction:
    """Import the built-in reward function of a data source. `judge`: settings for data sources that a judge grades.
    Raises ValueError if no grader matches the data source, or the judge's settings are incomplete."""
    grader = get_grader(data_source)
    function = pkgutil.resolve_name(f"alphaapollo.rewards.{grader.function}")
    grade: RewardFunction = function(judge) if grader.is_judge else function
    return grade


def is_gradable(prompt: Prompt) -> bool:
    """Return whether the prompt has a built-in grader, and a ground truth unless this grader is a judge."""
    grader = find_grader(prompt.data_source)
    return grader is not None and (grader.is_judge or prompt.ground_truth is not None)


def is_graded_by_judge(data_source: str) -> bool:
    """Return whether the built-in grader of the data source asks a judge model."""
    grader = find_grader(data_source)
    return grader is not None and grader.is_judge


def check_prompts_are_gradable(prompts: Iterable[Prompt], reward: Reward) -> None:
    """Check at startup that the built-in graders can grade every prompt.

    Raises ValueError if a data source has no grader, a prompt has no ground truth, or a data source needs the judge and
    reward.judge.model is empty or reward.timeout is too short.
    """
    prompts = list(prompts)
    graders = {source: get_grader(source) for source in sorted({prompt.data_source for prompt in prompts})}
    lacking = [one.id for one in prompts if one.ground_truth is None and not graders[one.data_source].is_judge]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(prompts)} prompts have no ground truth; the first of them is row {lacking[0]}. "
            "Add the field reward_model.ground_truth to these rows, or set custom_reward_function.path and .name."
        )
    judged = [source for source, grader in graders.items() if grader.is_judge]
    if judged and not reward.judge.model:
        raise ValueError(
            f"data_source {judged[0]!r} is graded by a judge, but reward.judge.model is empty. Set it to the judge's "
            "model name, and set reward.judge.base_url if the judge is not on OpenAI's server."
        )
    if judged and reward.timeout <= reward.judge.timeout:
        raise ValueError(
            f"reward.timeout={reward.timeout:g} must exceed reward.judge.timeout={reward.judge.timeout:g}, the "
            "time limit of one request to the judge. Raise reward.timeout so that there is time for retries."
        )
