"""The work of graders, extractors and judge parsers is linear in the length of the text, also for hostile texts."""

import contextlib
import itertools

import pytest

from alphaapollo.evaluation import estimates
from alphaapollo.evolving import roles
from alphaapollo.rewards import answers, components, judges, short_answers
from alphaapollo.rewards.components import COMPONENTS
from alphaapollo.rewards.judges import JUDGES
from alphaapollo.rewards.math import grader as math_grader
from alphaapollo.rewards.math import latex
from alphaapollo.rewards.registry import GRADERS, load_grader
from alphaapollo.tools.sandbox import SandboxUnavailableError
from alphaapollo.types import Prompt
from tests.unit.rewards.backtracking import count_steps
from tests.unit.rewards.work_counter import WorkCounter

try:
    from alphaapollo.rewards.code import grader as code_grader
except SandboxUnavailableError as error:
    pytest.skip(f"no sandbox: {error}", allow_module_level=True)


# (start, repeated part, end)
TEXTS = [
    ("The answer is", " ", "!"),
    ("The answer is", "\t\n", "!"),
    ("", "The answer is A. ", ""),
    ("", "The answer is a dog ", ""),
    ("", "answer: option ", "9"),
    ("", "<answer>", ""),
    ("", "</answer>", ""),
    ("", "<answer></answer>", ""),
    ("", "<think>", "</think>"),
    ("", "</think>", ""),
    ("Here:\n```python\ndef f(): return 1\n```\nso ```", "x", ""),
    ("", "```", ""),
    ("", "``` ", "\n"),
    ("```python\n", "\n ", "``"),
    ("", "```py\n``` ", ""),
    ("", "\\boxed{", ""),
    ("", "\\boxed{1} ", "x"),
    ("\\boxed{1}", " ", "\\boxed{2"),
    ("", "\\boxed ", ""),
    ("\\boxed", "\n", "{"),
    ("", "{", ""),
    ("", "}", ""),
    ("", "####", ""),
    ("#### ", "\n", ""),
    ("5*10^", " ", "x"),
    ("", "5*10^ ", "x"),
    ("", "1", ""),
    ("", "1,", ""),
    ("", "1 000 ", "0000"),
    ("", "\\frac{1", ""),
    ("", "2024-01-01 ", "="),
    ("x =", " ", "y z, a b or"),
    ("", "x = 5 or ", ""),
    ("", "**", ""),
    ("", "SCORE\n", ""),
    ("", "\n", "SCORE: x"),
    ("SCORE", ":", "x"),
    ("WINNER", "=-", "x"),
    ("VERDICT", ":", "x"),
    ("SCORE: ", "1.", "x"),
    ('{"1": ', "1", ""),
    ("", "$", "a"),
    ("", "\\(", ""),
    ("", "\\begin{a}\\end{", "\n"),
    ("", "a the ", ""),
    ("", "`", "a"),
]

JUDGE_PARSERS = {
    "judge": judges.read_score,
    "pairwise": judges.read_winner,
    "rubric": lambda reply: judges.read_criteria(reply, ["1"]),
    "thoughts": judges.remove_thoughts,
    "verdict": lambda reply: roles.is_last_choice(roles.VERDICT, reply, "right"),
    "markup": roles.strip_markup,
}
TRUTHS = {"gsm8k": "5", "multiple_choice": "A", "math": "5", "exact": "5", "search": "5", "search_f1": "5"}
READERS = {
    **{name: lambda text, name=name: load_grader(name)(Prompt(0, name, "?", TRUTHS[name]), text) for name in TRUTHS},
    **JUDGE_PARSERS,
    "code": code_grader.extract_code,
    "evaluation": estimates.extract_answer,
    "format": lambda text: components.score_format(Prompt(0, "", "?"), text),
    "format_opened": lambda text: components.score_format_without_opening_tag(Prompt(0, "", "?"), text),
    "language": lambda text: components.score_language(Prompt(0, "", "?"), text),
    "repetition": lambda text: components.score_distinct_ngrams(Prompt(0, "", "?"), text),
    "reasoning_gym": answers.find_answer_tag,
}
CODE = [answers, code_grader, components, estimates, judges, latex, math_grader, roles, short_answers]
SHORT, LONG = 10_000, 100_000  # characters
BOUND = 2_500  # characters; a pattern that never reads more takes constant time
STEPS_PER_CHARACTER = 60


def make_text(start: str, part: str, end: str, length: int) -> str:
    middle = length - len(start) - len(end)
    return start + (part * (middle // len(part) + 1))[:middle] + end


def read(name: str):
    def call(text: str) -> None:
        with contextlib.suppress(ValueError, RecursionError):  # no verdict; JSON that is too deep
            READERS[name](text)

    return call


def test_every_grader_and_component_is_measured():
    assert {*GRADERS, *COMPONENTS.names(), *JUDGES} <= READERS.keys()


@pytest.fixture(scope="module")
def counter():
    return WorkCounter(CODE)


@pytest.mark.parametrize("name", READERS)
def test_work_is_linear_in_the_length(name, counter, monkeypatch):
    handed = []
    if name == "math":  # math-verify and sympy are measured by the length of what they get
        parse = math_grader.parse
        monkeypatch.setattr(
            math_grader, "parse", lambda text, *args, **kw: handed.append(text) or parse(text, *args, **kw)
        )
    with counter.count_patterns():
        for text in TEXTS:
            short, long = (counter.measure(read(name), make_text(*text, length)) for length in (SHORT, LONG))
            assert long <= 10.5 * short + 5 * BOUND, text
    assert max(map(len, handed), default=0) <= BOUND


def test_patterns_that_read_whole_texts_take_linear_time(counter):
    """Each pattern that reads more than BOUND characters, on a text of BOUND characters."""
    with counter.count_patterns():
        for name, text in itertools.product(READERS, TEXTS):
            counter.measure(read(name), make_text(*text, 2 * BOUND))
    patterns = [key for key, length in counter.longest.items() if length > BOUND]
    assert len(patterns) > 15
    limit = STEPS_PER_CHARACTER * BOUND
    for (pattern, only_at_start), text in itertools.product(patterns, TEXTS):
        assert count_steps(pattern, make_text(*text, BOUND), only_at_start, limit) < limit, (pattern, text)
