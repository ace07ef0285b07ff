"""Reward components: extra rewards that `reward.components` adds, with weights, to the task reward.

    reward = w_task * task + sum over k of w_k * component_k

`task` is the reward of the built-in grader or of the user's function. A component is a judge (judges/), or a function
`(prompt, completion) -> float`, usually with values in [0, 1], that runs only in grader processes. Users register their
own components with the decorator `reward_component` in the file reward.custom_module."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from alphaapollo.config.schema import Reward
from alphaapollo.rewards.answers import find_answer_tag, find_boxed
from alphaapollo.rewards.base import get_question, make_failed_score
from alphaapollo.rewards.judges import JUDGES
from alphaapollo.rewards.plugins import load_plugin_reward
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.registry import Registry
from alphaapollo.utils.thoughts import CLOSING, OPENING, PAIRS, find_thoughts, split_thoughts

Component = Callable[[Prompt, str], float]
ComponentT = TypeVar("ComponentT", bound=Component)

TASK = "task"  # name of the task reward: the reward of the data source, or of the user's function
COMPONENTS: Registry[Component] = Registry("reward component")


def reward_component(function: ComponentT) -> ComponentT:
    """Decorator that registers a reward component under the name of the function. Raises ValueError if the name exists
    already or is reserved, or the function does not take (prompt, completion)."""
    name = function.__name__
    try:
        inspect.signature(function).bind("prompt", "completion")
    except TypeError as error:
        raise ValueError(
            f"reward component {name} cannot be called ({error}). Let it take (prompt, completion)."
        ) from error
    if name in (TASK, *JUDGES):
        raise ValueError(f"A reward component cannot be named {name}, the name of a built-in reward. Rename it.")
    return COMPONENTS.register(name)(function)


def check_component_names(names: Iterable[str], required: Iterable[str]) -> None:
    """Raise ValueError if a component in `names` does not exist, or a `required` one is not in `names`."""
    load_components(sorted(names))
    if absent := [name for name in required if name not in {TASK, *names}]:
        raise ValueError(
            f"reward.required: {absent[0]} is not in reward.components. Add it there with a weight, which may be 0."
        )


def load_components(names: Iterable[str], reward: Reward | None = None) -> dict[str, Component]:
    """Return {name: function} of the reward components with these names, except `task` and judges, which have no
    function. reward: settings of the functions of packages. Raises ValueError if a component does not exist."""
    functions, settings = dict[str, Component](), reward or Reward()
    for name in names:
        if name not in (TASK, *JUDGES):
            package_function = None if name in COMPONENTS else load_plugin_reward(name, settings)
            functions[name] = package_function or COMPONENTS.get(name)
    return functions


def add_component_rewards(
    task_score: Score, components: Mapping[str, float], weights: Mapping[str, float], required: Iterable[str]
) -> Score:
    """Combine the task score and the values of the reward components into one score.

    The reward is the weighted sum, where `task` has weight 1 unless `weights` contains it, or 0 if a `required` value
    is not above 0. The score's components are the unweighted values. A failed task score is returned unchanged."""
    if task_score.outcome.failed:
        return task_score
    values = {TASK: task_score.reward, **components}
    if duplicates := sorted(values.keys() & task_score.components.keys()):
        return make_failed_score(
            f"the reward function and reward.components both name {', '.join(duplicates)}. Rename it in your "
            "function's dict, or remove it from reward.components."
        )
    total = math.fsum(value * weights.get(name, 1.0) for name, value in values.items())
    if any(values[name] <= 0 for name in required):
        total = 0.0
    accuracy = {} if task_score.accuracy is None else {"accuracy": task_score.accuracy}
    return replace(task_score, reward=total, components=accuracy | task_score.components | values)


NGRAM_LENGTH = 4  # words
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"  # scripts without spaces: each character counts as a word
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")


MARK_READERS = ("format", "language")  # components that get the text with all marks of thoughts (add_marks)


@COMPONENTS.register("format")
def score_format(prompt: Prompt, completion: str) -> float:
    """Return 1 if a completion is one thought, e.g. `<think>...</think>`, followed by one answer, else 0.

    The answer is one non-empty `<answer>...</answer>` or, in a text without answer tags, a boxed expression
    (arXiv 2506.10910, section 2.2.1)."""
    text = completion.lstrip()
    thought = next(iter(find_thoughts(text)), None)
    starts_with_thought = text.startswith((*PAIRS, "<|channel|>"))
    if thought is None or not (starts_with_thought and thought.is_closed) or OPENING.search(thought.content):
        return 0.0
    answer = text[thought.end :]
    num_tags = (answer.count("<answer>"), answer.count("</answer>"))
    if OPENING.search(answer) or CLOSING.search(answer):
        return 0.0
    if num_tags == (0, 0):
        return float(bool(find_boxed(answer)))
    return float(num_tags == (1, 1) and bool(find_answer_tag(answer)))


@COMPONENTS.register("format_opened")
def score_format_without_opening_tag(prompt: Prompt, completion: str) -> float:
    """Return `score_format` of `<think>` + completion, for chat templates that end the prompt with `<think>`."""
    closing = CLOSING.search(completion)
    opening = next((mark for mark, end in PAIRS.items() if closing and end == closing[0]), "<think>")
    return score_format(prompt, opening + completion)


@COMPONENTS.register("think_format")
def score_thoughts(prompt: Prompt, completion: str) -> float:
    """Return 1 if a completion starts with one `<think>...</think>`, else 0 (`think_format_reward` of TRL)."""
    is_closed = completion.startswith("<think>") and "</think>" in completion
    return float(is_closed and completion.count("<think>") == 1)


@COMPONENTS.register("repetition")
def score_distinct_ngrams(prompt: Prompt, completion: str) -> float:
    """Return the share of distinct 4-grams among all 4-grams: 1 without repetition, near 0 for a loop.

    The share equals 1 minus seq-rep-4 of arXiv 1908.04319. Each punctuation mark counts as a word. A text of fewer than
    4 words scores 1."""
    words = WORD.findall(completion)
    ngrams = list(zip(*(words[start:] for start in range(NGRAM_LENGTH)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


# Subset of the classifier's 139 languages: it mistakes short texts for related languages (Wu, Malay, Nigerian Pidgin).
LANGUAGES = (
    "ar az bg bn ca cs da de el en es et eu fa fi fr gu he hi hr hu hy id it ja ka kk kn ko lt lv ml mr nl no pa pl pt "
    "ro ru sk sl sr sv sw ta te th tl tr uk ur vi zh"
)
MIN_LETTERS = 40  # shorter texts are not classified; with 40 letters, 99.9 % of English solutions are recognized
DENSE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")  # kana, ideographs, hangul
DENSITY = 5  # number of letters that one DENSE character counts as
NOT_PROSE = re.compile(
    r"""
    ```.*?(?:```|\Z)                                       # code
    | `[^`\n]*`
    | \$\$[^$]*\$\$                                        # LaTeX
    | \$(?=\S)[^$\n]*(?<=\S)\$(?!\d)                       # ... but "$5 and $10" are prices
    | \\\[(?:(?!\\[\[\]]).)*\\\]
    | \\\((?:(?!\\[()]).)*\\\)
    | \\begin\{(?:(?!\\begin\{|\\end\{).)*\\end\{\w+\*?\}
    | \\[a-zA-Z]+
    | </?\w+>                                              # tags
    | [!-&(-@\[-`{-~]                                      # digits, punctuation other than apostrophes
    """,
    re.VERBOSE | re.DOTALL,
)


@cache
def _load_language_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(LANGUAGES.split())
    return identifier


@COMPONENTS.register("language")
def score_language(prompt: Prompt, completion: str) -> float:
    """Return 1 if the user's messages, the thoughts and the answer are in the same language, else 0. LaTeX, code and
    parts with fewer than MIN_LETTERS letters are ignored. If both thoughts and answer are ignored, the result is 0."""
    thoughts, answer = split_thoughts(completion)
    languages = {detect_language(thoughts), detect_language(answer)} - {None}
    return float(len(languages) == 1 and detect_language(get_question(prompt)) in {*languages, None})


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the main language of a text, or None for fewer than MIN_LETTERS letters."""
    words = extract_prose(text)
    letters = sum(map(str.isalpha, words)) + (DENSITY - 1) * len(DENSE.findall(words))
    return str(_load_language_identifier().classify(words)[0]) if letters >= MIN_LETTERS else None


def extract_prose(text: str) -> str:
    """Remove code, LaTeX, tags, numbers and punctuation from a text."""
    return " ".join(NOT_PROSE.sub(" ", text).split())
