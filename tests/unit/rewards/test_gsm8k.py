import json
from fractions import Fraction
from pathlib import Path

import pytest

from alphaapollo.rewards.gsm8k import grade, read_final_number
from alphaapollo.types import Outcome, Prompt

LABELLED = Path(__file__).parents[2] / "data/gsm8k_model_solutions.jsonl"


def prompt(truth):
    return Prompt(0, "gsm8k", "?", truth)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", 72),
        ("#### $1,200", 1200),
        ("#### -12\nbye 5", -12),
        ("so she has 3 + 4 = 7 apples.", 7),
        ("5-3", 3),
        ("x = -5", -5),
        ("(-5)", -5),
        ("-$5", -5),
        (r"\boxed{\$18}", 18),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        ("1/2", Fraction(1, 2)),
        ("1/0", None),
        ("#### 1 000", 1000),
        ("#### 12 345 678", 12345678),
        ("<answer>$1 000 a month</answer>", 1000),
        ("5 100", 100),
        (r"\boxed{1{,}000}", 1000),
        (r"so $1\,000$", 1000),
        ("#### 1e3", 1000),
        ("#### 2.5E-1", Fraction(1, 4)),
        (r"\boxed{1.2 \times 10^{3}}", 1200),
        ("3 eggs", 3),
        ("1e99999999999999", None),
        ("1e201", None),
        ("2024-05", None),
        ("It is 18 (seen on 2024-05-31).", 18),
        ("2024-12 = 2012", 2012),
        (".5", Fraction(1, 2)),
        ("3.", 3),
        ("50%", 50),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("<answer>\\boxed{7}</answer> 8", 7),
        ("<answer>none</answer> 8", None),
        ("no number", None),
        ("", None),
        ("3" * 5000, None),
    ],
)
def test_the_final_number(text, number):
    assert read_final_number(text) == number


@pytest.mark.parametrize(("text", "reward"), [("#### 18", 1.0), ("18.0", 1.0), ("#### 19", 0.0)])
def test_equal_numbers_earn_one(text, reward):
    score = grade(prompt("18"), text)
    assert (score.reward, score.accuracy, score.outcome) == (reward, reward, Outcome.SCORED)


def test_ground_truth_may_be_a_complete_solution():
    assert grade(prompt("9 * 2 = <<9*2=18>>18\n#### 18"), "18").reward == 1.0


def test_no_number_is_a_wrong_format():
    score = grade(prompt("18"), "I do not know")
    assert (score.reward, score.outcome) == (0.0, Outcome.WRONG_FORMAT)


@pytest.mark.parametrize("truth", [None, "", "many"])
def test_ground_truth_without_number_raises(truth):
    with pytest.raises(ValueError, match="has no number"):
        grade(prompt(truth), "5")


@pytest.mark.parametrize("line", LABELLED.read_text(encoding="utf-8").splitlines(), ids=lambda line: line[:30])
def test_it_agrees_with_labelled_solutions(line):
    problem = json.loads(line)
    truth = problem["ground_truth"].rpartition("A:")[2].strip()
    solutions = [value for value in problem.values() if isinstance(value, dict)]
    assert len(solutions) == 4
    for solution in solutions:
        assert grade(prompt(truth), solution["solution"]).reward == float(solution["is_correct"]), solution
