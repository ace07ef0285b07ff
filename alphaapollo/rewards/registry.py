"""Graders by `data_source`, and the startup check that they can grade a data set."""

from __future__ import annotations

import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from alphaapollo.config.schema import Reward
from alphaapollo.data.findings import DataFinding
from alphaapollo.rewards.base import RewardFunction
from alphaapollo.rewards.components import COMPONENTS, TASK
from alphaapollo.rewards.judges import JUDGES, check_judge_server, list_criteria
from alphaapollo.rewards.plugins import load_plugin_reward
from alphaapollo.types import Prompt
from alphaapollo.utils.plugins import find_own_plugins, find_plugins, load_plugin
from alphaapollo.utils.thoughts import remove_thoughts

GRADERS = {  # name -> patterns of data sources, lower case; the first matching grader is used
    "gsm8k": "*gsm8k* *svamp*",
    "exact": "exact exact/*",
    **{name: f"{name} {name}/*" for name in JUDGES},
    "search_f1": "search_f1 search_f1/*",
    "search": "search search/* searchr1_* nq nq/* *nq_open* *trivia*qa* *popqa* *hotpot* *musique* *squad* *2wiki* "
    "*bamboogle*",
    "multiple_choice": "multiple_choice multiple_choice/* *mmlu* *gpqa* *ai2_arc* *commonsense_qa* *medqa*",
    "code": "code code/* *humaneval* *mbpp* *livecodebench* *code_contests* *codecontests* apps */apps *taco* "
    "*codeforces* *leetcode* *kodcode* *deepcoder* primeintellect",
    "math": "*math* *aime* *amc* *hmmt* *olympiad* *minerva* *numina* *deepscaler* *dapo*",
}
"""The grader `code` is the plug-in code_grader; the functions of the others are in this package."""


def find_grader(data_source: str) -> str | None:
    """Return the name of the grader of a data source: the grader of a plug-in or an installed package with this name,
    else the first built-in grader with a pattern that matches."""
    plugins = {name.lower(): name for name in find_plugins("rewards")}
    if name := plugins.get(data_source.lower().partition("/")[0]):
        return name
    matching = (
        name
        for name, patterns in GRADERS.items()
        if any(fnmatchcase(data_source.lower(), pattern) for pattern in patterns.split())
    )
    return next(matching, None)


def get_grader(data_source: str) -> str:
    """Return the name of the grader of a data source. Raises ValueError if no pattern matches."""
    if (grader := find_grader(data_source)) is not None:
        return grader
    if data_source in find_plugins("environments"):  # e.g. harbor: task folders
        raise ValueError(
            f"rows of the data source {data_source} are graded by the environment of this name. Set "
            f"env.env_name={data_source}, or another environment that grades them, e.g. agent."
        )
    added = find_plugins("rewards").keys() - GRADERS.keys()
    patterns_of = {name: f"{name} {name}/*" for name in sorted(added)} | GRADERS
    known = "; ".join(f"{name}: {', '.join(patterns.split())}" for name, patterns in patterns_of.items())
    got = f"data_source {data_source!r}" if data_source else "rows without a data_source"
    raise ValueError(
        f"no reward function for {got}. Use a data_source that matches a known pattern, or set "
        f"custom_reward_function.path and .name. Known patterns: {known}."
    )


def load_grader(data_source: str, reward: Reward | None = None) -> RewardFunction:
    """Import the reward function of a data source. Built-in functions grade completions without their thoughts. Raises
    ValueError if no grader matches."""
    if function := load_plugin_reward(get_grader(data_source), reward or Reward()):
        return function
    grade = _load_function(data_source, "grade")
    return lambda prompt, completion: grade(prompt, remove_thoughts(completion))


def load_answer_maker(data_source: str) -> Callable[[Prompt], str | None]:
    """Import the function that makes an answer to a prompt. The grader must score the answer 1. None: not possible."""
    if plugin_grader := load_plugin("rewards", get_grader(data_source)):
        return getattr(plugin_grader, "make_answer", lambda prompt: None)
    function: Callable[[Prompt], str | None] = _load_function(data_source, "answer")
    return function


def _load_function(data_source: str, verb: str) -> Any:
    grader = get_grader(data_source)
    module = "math.grader" if grader == "math" else "short_answers"  # imported only in grader processes
    return pkgutil.resolve_name(f"alphaapollo.rewards.{module}:{verb}_{grader}")


_PHRASES = (
    "(?:see )?(?:the )?proof(?: omitted| below| problem| question| based| only| required)?",
    "see (?:the )?(?:solution|explanation|answer|text|above|below)",
    "(?:answer )?not (?:found|available|applicable|provided|given|specified|known|needed|required)",
    "no (?:final )?(?:answer|ground truth)(?: is)?(?: found| available| given| provided| needed| required)?",
    "n[./\\s]?a|none|null|nan|nil|unknown|tbd|tba|to be (?:determined|decided|announced)|to ?do|missing|pending",
)
NO_ANSWER = re.compile(rf"[\W_]*(?:{'|'.join(_PHRASES)})[\W_]*|[\s.?_\u2013\u2014-]*".replace(" ", r"[\W_]*"), re.I)
"""Ground truths with which data sets say that a row has no answer."""
TEXT_COMMAND = re.compile(r"\\(?:boxed|text|math)[a-z]*(?=\{)")
MATH_GRADERS = ("math", "gsm8k")  # graders for which a text of NO_ANSWER is never an answer


def leave_out_missing_answers(prompts: Sequence[Prompt], findings: list[DataFinding]) -> list[Prompt]:
    """Return the prompts without those of a math grader whose ground truth says that there is no answer (NO_ANSWER).
    Adds to `findings` such ground truths of all data sources, and ground truths that at least a fifth of the rows have.
    Raises ValueError if no prompt remains."""
    totals = Counter(prompt.data_source for prompt in prompts)
    kept = [prompt for prompt in prompts if not _has_no_answer(prompt)]
    groups: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        if prompt.ground_truth is not None:
            groups[prompt.data_source, str(prompt.ground_truth)].append(prompt)
    for (source, truth), group in groups.items():
        share, effect = len(group) / totals[source], ""
        if NO_ANSWER.fullmatch(TEXT_COMMAND.sub("", truth)):
            effect = "left out" if _has_no_answer(group[0]) else "kept, although it may stand for no answer"
        elif share >= 0.2 and len(group) >= 5:
            effect = "kept; an answer that is always the same gets this share"
        if effect:
            content = f"the ground truth {truth!r:.80} ({share:.0%})"
            findings.append(DataFinding(f"data_source {source!r}", content, effect, len(group), totals[source]))
    if prompts and not kept:
        text = f"all ground truths, e.g. {prompts[0].ground_truth!r}, stand for no answer. Use rows with answers."
        raise ValueError(text)
    return kept


def _has_no_answer(prompt: Prompt) -> bool:
    """Whether the ground truth of a prompt with a math grader says that there is no answer."""
    truth = prompt.ground_truth
    says_no_answer = truth is not None and bool(NO_ANSWER.fullmatch(TEXT_COMMAND.sub("", str(truth))))
    return says_no_answer and find_grader(prompt.data_source) in MATH_GRADERS


def _needs_truth(grader: str) -> bool:
    """Whether a grader cannot grade without a ground truth: all built-in graders except judges, and functions of
    packages with needs_ground_truth=True."""
    if grader in GRADERS:
        return grader not in JUDGES
    return bool(getattr(load_plugin("rewards", grader), "needs_ground_truth", False))


def is_gradable(prompt: Prompt) -> bool:
    """Return whether the prompt has a grader, and a ground truth if this grader needs one."""
    grader = find_grader(prompt.data_source)
    has_truth = prompt.ground_truth is not None and not _has_no_answer(prompt)
    return grader is not None and (has_truth or not _needs_truth(grader))


def assign_judges(prompt: Prompt, reward: Reward, is_custom: bool) -> dict[str, str]:
    """Return the judges that score the completions of a prompt: {name of a component, or `task`: judge}."""
    grader = None if is_custom else find_grader(prompt.data_source)
    task = {TASK: grader} if grader is not None and grader in JUDGES else {}
    return task | {name: name for name in reward.components if name in JUDGES}


def check_judges(prompts: Iterable[Prompt], reward: Reward, is_custom: bool) -> set[str]:
    """Return the names of the judges that the prompts need; see assign_judges for the arguments. Raises ValueError if
    reward.judge is incomplete, or a prompt has no criteria for a rubric or no answer to compare completions with."""
    judges_so_far = set[str]()
    for prompt in prompts:
        judges = {*assign_judges(prompt, reward, is_custom).values()}
        if judges and not judges_so_far and reward.judge.backend == "server":
            check_judge_server(reward.judge)
        if "rubric" in judges:
            list_criteria(reward.rubric, prompt)
        if "pairwise" in judges and prompt.ground_truth is None:
            raise ValueError(
                f"row {prompt.id} is graded by comparison with its ground truth, but has none. Add the field "
                "reward_model.ground_truth to this row."
            )
        judges_so_far |= judges
    return judges_so_far


def check_prompts_are_gradable(prompts: Iterable[Prompt]) -> None:
    """Raise ValueError if a data source has no grader, or a prompt lacks a ground truth that it needs."""
    prompts = list(prompts)
    built_in = {TASK, *GRADERS, *COMPONENTS.names()} - find_own_plugins("rewards").keys()
    plugins = find_plugins("rewards", built_in)  # raises ValueError for a name that is taken
    graders = {source: get_grader(source) for source in sorted({prompt.data_source for prompt in prompts})}
    for grader in graders.values():
        if grader in plugins and plugins[grader].is_missing:
            raise ValueError(plugins[grader].missing_error)
    without_truth = (prompt for prompt in prompts if prompt.ground_truth is None)
    lacking = [prompt for prompt in without_truth if _needs_truth(graders[prompt.data_source])]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(prompts)} prompts have no ground truth; the first of them is row {lacking[0].id}. "
            f"Write it to a column ground_truth (other columns: {', '.join(lacking[0].extra_info) or 'none'}), or set "
            "custom_reward_function.path and .name."
        )
