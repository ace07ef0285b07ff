import json
from pathlib import Path

import pytest

from alphaapollo.rewards.math import grader
from alphaapollo.types import Outcome, Prompt


def score(truth, text):
    return grader.grade_math(Prompt(0, "math", "?", truth), text)


@pytest.mark.parametrize(
    ("truth", "texts"),
    [
        (r"\frac{1}{2}", [r"The answer is \boxed{0.5}", "<answer>1/2</answer>"]),
        (r"\frac{3}{4}", [r"\boxed{\dfrac34}"]),
        ("x+1", [r"<answer>\boxed{1+x}</answer>", "<answer>1+x</answer>"]),
        ("5", ["<answer>The answer is 5.</answer>", "<answer>The answer is 5 apples</answer>", "<answer>$5$</answer>"]),
        ("5", [r"<answer>\(5\)</answer>", "so the answer is $x=5$."]),
        ("18", ["<answer>18 dollars</answer>", r"\boxed{\$18}"]),
        (r"\$18", [r"\boxed{18}"]),
        ("1,234", [r"\boxed{1234}"]),
        (r"2\sqrt{3}", [r"\boxed{\sqrt{12}}", "The length is 2√3."]),
        (r"\{1,2\}", [r"\boxed{\{2,1\}}"]),
        ("(3,4)", [r"\boxed{(3, 4)}"]),
        (r"(-\infty, 3]", [r"\boxed{(-\infty,3]}"]),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"]),
        (r"\text{Monday}", [r"\boxed{Monday}"]),
        ("12", [r"\boxed{12 \text{ cm}}"]),
        (r"so it is \boxed{7}", ["7"]),
        ("72", ["she sold 48+24 = 72 clips.\n#### 72"]),
        ("-4", ["The minimum is \N{MINUS SIGN}4."]),
        ("27", ["The number of ways is **27**.", "There are 27 such integers."]),
        ("5, 6", ["It is 5 or 6."]),
        (r"\pm 5", ["It is 5 or -5."]),
        ("6", ["It is 6 or 12/2."]),
        ("7", ["So x is 3 or 4, and the sum is 7.", "x = 3 or x = 4.\nThe sum is 7."]),
        (r"\text{(B)}", ["The correct option is (B)."]),
        (r"\text{Yes}", ["The answer is Yes."]),
        ("6", [r"\boxed{x=6}", r"\boxed{6=5+1}", r"\boxed{6=6}", r"\boxed{x \to 6}", r"\boxed{f(5)=6}"]),
    ],
)
def test_equal_answers_earn_one(truth, texts):
    for result in (score(truth, text) for text in texts):
        assert (result.reward, result.outcome) == (1.0, Outcome.SCORED)


@pytest.mark.parametrize(
    ("truth", "texts"),
    [
        ("5", [r"\boxed{6} though 5", "It is 5 or 6.", "<answer>x+5</answer>"]),
        ("6", ["It is 5 or 6", "It is 5, or 6.", "x = 5 or x = 6.", "It is 5 cm or 6 cm.", "Either 5 or 6 works."]),
        ("6", ["The answer is 5 or 6."]),
        ("2", ["<answer>1 and 2</answer>"]),
        ("(3,4)", [r"\boxed{(4, 3)}"]),
        ("Monday", [r"\boxed{Tuesday}", "The answer is Tuesday."]),
        ("28", ["The number of ways is **27**."]),
        ("6", [r"\boxed{5=6}", r"\boxed{5 \to 6}", r"\boxed{5\mid 6}", r"\boxed{x=5=6}"]),
        ("6", [r"\boxed{5 @ 6}", "\\boxed{5 \N{RIGHTWARDS ARROW} 6}"]),
    ],
)
def test_other_answers_earn_nothing(truth, texts):
    for result in (score(truth, text) for text in texts):
        assert (result.reward, result.accuracy, result.outcome) == (0.0, 0.0, Outcome.SCORED)


# {truth; right, wrong: contents of the box; right_texts, wrong_texts: whole completions; missed: right, graded wrong}
ANSWERS = [json.loads(line) for line in Path(__file__).with_name("math_answers.jsonl").read_text("utf-8").splitlines()]
KINDS = ("right", "wrong", "right_texts", "wrong_texts", "missed")


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row["truth"])
def test_it_agrees_with_labelled_answers(row):
    texts = {kind: [f"It is $\\boxed{{{answer}}}$." for answer in row.get(kind, [])] for kind in ("right", "wrong")}
    for kind, reward in (("right", 1.0), ("wrong", 0.0)):
        for text in texts[kind] + row.get(f"{kind}_texts", []):
            assert score(row["truth"], text).reward == reward, text


def test_there_are_enough_labelled_answers():
    counts = {kind: sum(len(row.get(kind, [])) for row in ANSWERS) for kind in KINDS}
    assert (len(ANSWERS), sum(counts.values()), counts["missed"]) == (440, 2281, 21)


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{" * 3000,
        "\\boxed{" + "1" * 5000 + "}",
        "\\boxed{" + "(" * 800 + "5" + ")" * 800 + "}",
        "\\boxed{" + "{(" * 200 + "5" + ")}" * 200 + "}",
        "answer is " * 5000,
    ],
)
def test_degenerate_answers_are_wrong(answer):
    assert score("5", answer).reward == 0.0


@pytest.mark.parametrize(
    ("truth", "text", "reward"),
    [
        ("5", r"\boxed{10^{10^{10}}}", 0.0),  # compared by size
        (r"\boxed{10^{10^{10}}}", "5", 0.0),
        ("9^{9^{9^{9}}}", r"\boxed{9^{9^{9^9}}}", 1.0),  # the same text
        ("0.00000001", r"\boxed{0.00000002}", 0.0),  # the tolerance is relative
        (r"\frac{100!}{50!}", r"\boxed{\frac{100!}{49!}}", 0.0),
        (r"\frac{1}{3}", r"\boxed{0.33333333}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.333}", 0.0),
    ],
)
def test_large_and_small_numbers(truth, text, reward):
    assert score(truth, text).reward == reward
