"""The time of graders, extractors and judge parsers is linear in the length of the text, also for hostile texts."""

import contextlib
import gc
import time

import pytest

from alphaapollo.observability.majority_vote import extract_answer
from alphaapollo.rewards.answers import find_answer_tag
from alphaapollo.rewards.components import COMPONENTS, load_components
from alphaapollo.rewards.judges import JUDGES, read_criteria, read_score, read_winner
from alphaapollo.rewards.math import grader as math_grader
from alphaapollo.rewards.registry import GRADERS, load_grader
from alphaapollo.types import Prompt
from alphaapollo.utils.plugins import find_own_plugins
from alphaapollo.utils.thoughts import remove_thoughts

WORDS = r"<answer> </answer> <answer></answer> </think> ``` \boxed{ { } #### 1 1, \frac{1 ** \(".split()  # noqa: SIM905
PHRASES = ["The answer is A. ", "The answer is a dog ", "x = 5 or ", "a the ", "SCORE\n", "\\boxed ", "```py\n``` "]
# (start, repeated part, end)
TEXTS = [
    *(("", part, "") for part in WORDS + PHRASES),
    ("The answer is", " ", "!"),
    ("", "answer: option ", "9"),
    ("", "<answer>1</answer> or maybe ", ""),
    ("", "\\boxed{1} and\n1. x = ", ""),
    ("\\boxed{1}", "a1=a) ", "\\boxed{2}"),
    ("", "\\boxed{1}" + "a) a= " * 19 + "and ", "!\\boxed{2}"),
    ("", "1\\!  ", "000"),
    ("", "<think>", "</think>"),
    ("Here:\n```python\ndef f(): return 1\n```\nso ```", "x", ""),
    ("", "``` ", "\n"),
    ("```python\n", "\n ", "``"),
    ("\\boxed{1}", " ", "\\boxed{2"),
    ("\\boxed", "\n", "{"),
    ("#### ", "\n", ""),
    ("5*10^", " ", "x"),
    ("", "1 000 ", "0000"),
    ("", "2024-01-01 ", "="),
    ("x =", " ", "y z, a b or"),
    ("", "\n", "SCORE: x"),
    ("SCORE: ", "1.", "x"),
    ('{"1": ', "1", ""),
    ("", "$", "a"),
    ("", "\\begin{a}\\end{", "\n"),
]


def grading(function, source="", truth=None):
    return lambda text: function(Prompt(0, source, "?", truth), text)


TRUTHS = {"gsm8k": "5", "multiple_choice": "A", "math": "5", "exact": "5", "search": "5", "search_f1": "5"}
READERS = {
    **{name: grading(load_grader(name), name, truth) for name, truth in TRUTHS.items()},
    **{name: grading(function) for name, function in load_components(COMPONENTS.names()).items()},
    "judge": read_score,
    "pairwise": read_winner,
    "rubric": lambda reply: read_criteria(reply, ["1"]),
    "thoughts": remove_thoughts,
    "evaluation": extract_answer,
    "reasoning_gym": find_answer_tag,
}
SHORT, LONG = 10_000, 100_000  # characters
BOUND = 2_500  # characters that math-verify and sympy get, of a text of any length


def make_text(start: str, part: str, end: str, length: int) -> str:
    middle = length - len(start) - len(end)
    return start + (part * (middle // len(part) + 1))[:middle] + end


def measure(name: str, text: str) -> float:
    """CPU seconds of this thread, which do not depend on other processes."""
    start = time.thread_time()
    with contextlib.suppress(ValueError, RecursionError):  # no verdict; JSON that is too deep
        READERS[name](text)
    return time.thread_time() - start


def is_linear(name: str, text: tuple[str, str, str]) -> bool:
    """Whether ten times the text takes about ten times as long. Quadratic work takes a hundred times as long."""
    for _ in range(3):
        short, long = (measure(name, make_text(*text, length)) for length in (SHORT, LONG))
        if long < 20 * short + 0.02 or long > 2:
            return long < 20 * short + 0.02
    return False


def test_every_grader_and_component_is_measured():
    assert {*GRADERS, *COMPONENTS.names(), *JUDGES} <= {*READERS, *find_own_plugins("rewards")}


@pytest.mark.parametrize("name", READERS)
def test_time_is_linear_in_the_length(name, monkeypatch):
    handed, parse = [], math_grader.parse
    monkeypatch.setattr(math_grader, "parse", lambda text, *args, **kw: handed.append(text) or parse(text, *args, **kw))
    gc.disable()
    try:
        assert [text for text in TEXTS if not is_linear(name, text)] == []
    finally:
        gc.enable()
    assert max(map(len, handed), default=0) <= BOUND
