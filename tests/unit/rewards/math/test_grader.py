import json
from pathlib import Path

import pytest

from alphaapollo.rewards.math import grader
from alphaapollo.types import Outcome, Prompt


def score(truth, text):
    return grader.grade_math(Prompt(0, "math", "?", truth), text)


# {truth; right, wrong: contents of the box; right_texts, wrong_texts: whole completions; missed: right, graded wrong}
ANSWERS = [json.loads(line) for line in Path(__file__).with_name("math_answers.jsonl").read_text("utf-8").splitlines()]
UNREADABLE = ("", r"\boxed{}", "I do not know.", "The answer is Tuesday.")
KINDS = ("right", "wrong", "right_texts", "wrong_texts", "missed")


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row["truth"])
def test_it_agrees_with_labelled_answers(row):
    for kind, reward in (("right", 1.0), ("wrong", 0.0)):
        boxed = [f"It is $\\boxed{{{answer}}}$." for answer in row.get(kind, [])]
        for text in boxed + row.get(f"{kind}_texts", []):
            result = score(row["truth"], text)
            outcome = Outcome.WRONG_FORMAT if text in UNREADABLE else Outcome.SCORED
            assert (result.reward, result.accuracy, result.outcome) == (reward, reward, outcome), text


def test_there_are_enough_labelled_answers():
    counts = {kind: sum(len(row.get(kind, [])) for row in ANSWERS) for kind in KINDS}
    assert (len(ANSWERS), sum(counts.values()), counts["missed"]) == (460, 2386, 45)


# of math-verify's tests; {truth, text, expected; reason: why this grader differs}
_, *COMPARED = map(json.loads, Path(__file__).with_name("math_verify.jsonl").read_text("utf-8").splitlines())


def test_it_agrees_with_math_verify_except_for_reasons():
    assert len(COMPARED) == 269 and sum("reason" in row for row in COMPARED) == 11
    for row in COMPARED:
        assert (score(row["truth"], row["text"]).reward == row["expected"]) is ("reason" not in row), row


DEGENERATE = [
    "\\boxed{" * 3000,
    "\\boxed{" + "1" * 5000 + "}",
    "\\boxed{" + "(" * 800 + "5" + ")" * 800 + "}",
    "\\boxed{" + "{(" * 200 + "5" + ")}" * 200 + "}",
    "answer is " * 5000,
]


@pytest.mark.parametrize("answer", DEGENERATE)
def test_degenerate_answers_are_wrong(answer):
    assert score("5", answer).reward == 0.0


LARGE_AND_SMALL = [
    ("5", r"\boxed{10^{10^{10}}}", 0.0),  # compared by size
    (r"\boxed{10^{10^{10}}}", "5", 0.0),
    ("9^{9^{9^{9}}}", r"\boxed{9^{9^{9^9}}}", 1.0),  # the same text
    ("0.00000001", r"\boxed{0.00000002}", 0.0),  # the tolerance is relative
    (r"\frac{100!}{50!}", r"\boxed{\frac{100!}{49!}}", 0.0),
    (r"\frac{1}{3}", r"\boxed{0.33333333}", 1.0),
    (r"\frac{1}{3}", r"\boxed{0.333}", 0.0),
]


@pytest.mark.parametrize(("truth", "text", "reward"), LARGE_AND_SMALL)
def test_large_and_small_numbers(truth, text, reward):
    assert score(truth, text).reward == reward
