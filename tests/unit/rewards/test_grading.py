"""Each grader scores right, wrong and unreadable answers to each kind of ground truth, or refuses the ground truth."""

import datetime
import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from alphaapollo.rewards.answers import read_accepted_answers
from alphaapollo.rewards.registry import (
    check_prompts_are_gradable,
    get_grader,
    leave_out_missing_answers,
    load_answer_maker,
    load_grader,
)
from alphaapollo.types import Outcome, Prompt
from alphaapollo.utils.thoughts import PAIRS

CITIES = {"choices": ["London", "Paris", "Rome", "Bonn"]}
ARC = {"choices": {"label": ["1", "2", "3"], "text": ["ice", "fire", "sand"]}}
LETTERS = {"options": {"A": "ice", "C": "sand", "B": "fire"}}
NUMBERS = {"choices": ["2", "0", "1", "3"]}

DATA_SOURCES = {
    "gsm8k": "openai/gsm8k gsm8k ChilleD/SVAMP",
    "math": "DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 HuggingFaceH4/aime_2024 math "
    "BytedTsinghua-SIA/DAPO-Math-17k",
    "exact": "exact",
    "search": "rajpurkar/squad_v2 searchR1_nq searchR1_2wikimultihopqa searchR1_bamboogle",
    "search_f1": "search_f1/mine",
    "multiple_choice": "cais/mmlu",
    "code": "openai/openai_humaneval codeparrot/apps apps codecontests codeforces taco kodcode",
    "judge": "judge/essays",
    "rubric": "rubric",
    "pairwise": "pairwise/math",
}


@pytest.mark.parametrize("grader", DATA_SOURCES)
def test_data_sources_find_their_grader(grader):
    assert {get_grader(data_source) for data_source in DATA_SOURCES[grader].split()} == {grader}


def grade(name, truth, text):
    return load_grader(name)(Prompt(0, name, "?", truth), text)


GRADED = [
    ("exact", "the cat", ["the cat", "<answer>the cat</answer>"], ["a cat", "The cat", "it is the cat"]),
    ("exact", "the cat", ["hm\n<answer> the\n cat </answer> done"], ["<answer>the dog</answer> the cat"]),
    ("exact", '["the cat", "a cat"]', ["the cat", "a cat", '["the cat", "a cat"]'], ["cat"]),
    ("exact", "['the cat' 'a cat']", ["the cat", "a cat"], ["cat"]),
    ("exact", np.array(["the cat", "a cat"], dtype=object), ["a cat"], ["cat"]),
    ("exact", [1, 2.0, None, ""], ["1", "2"], ["None", "3"]),
    ("exact", 12.0, ["12", "12.0"], ["120"]),
    ("exact", float(np.float32(0.1)), ["0.1"], ["0.2"]),
    ("exact", True, ["True", "true", "yes", "Yes"], ["False", "no", "1"]),
    ("exact", np.False_, ["False", "no"], ["True"]),
    ("exact", datetime.date(2024, 5, 1), ["2024-05-01"], ["2024-05-02"]),
    ("gsm8k", 18, ["#### 18", "18.0"], ["19", "#### 19"]),
    ("gsm8k", [18, "20"], ["18", "20"], ["1820", "19"]),
    ("gsm8k", "[18, 20]", ["18", "20"], ["19"]),
    ("gsm8k", Decimal("0.50"), ["1/2", "0.5"], ["5"]),
    ("gsm8k", Fraction(1, 3), ["1/3"], ["3"]),
    ("gsm8k", "#### 1,200", ["1200"], ["200"]),
    ("math", ["12", "34"], [r"\boxed{12}", r"\boxed{34}"], [r"\boxed{1234}", r"\boxed{12, 34}"]),
    ("math", [r"\frac{1}{2}", "x"], [r"\boxed{0.5}", r"\boxed{x}"], [r"\boxed{y}"]),
    ("math", "[1, 2]", [r"\boxed{[1,2]}"], [r"\boxed{1}", r"\boxed{2}"]),
    ("math", True, [r"\boxed{\text{Yes}}", r"\boxed{True}"], [r"\boxed{\text{No}}"]),
    ("search", {"target": ["Paris", "City of Light"]}, ["Paris", "the city of light"], ["London"]),
    ("search", {"target": np.array(["Paris"], dtype=object)}, ["Paris"], ["ari", "London"]),
    ("search", "[1945, 1946]", ["1945", "1946"], ["1944"]),
    ("search", {"text": ["Paris", "paris"], "answer_start": [3, 9]}, ["Paris"], ["3", "9"]),
    ("search", {"value": "Paris", "aliases": ["Lutetia"], "type": "WikipediaEntity"}, ["Lutetia"], ["London"]),
    ("mmlu", "B", ["B", "Answer: (b)"], ["A", "A, B", "AB"]),
    ("exact", "6", ["<think>5</think> 6"], ["<answer>5</answer> or <answer>6</answer>"]),
    ("gsm8k", "2,\\! 500", ["2500", "<think>1</think> 2500"], ["500", "<think>2500</think> 500"]),
    ("math", "5", ["<think>\\boxed{4}</think> 5"], ["\\boxed{5}</think> 4", "\\boxed{4}</think> is 4"]),
    ("search", "Paris", ["<think>\\boxed{Rome}</think>Paris"], ["\\boxed{Rome} or \\boxed{Paris}"]),
    ("mmlu", "(B) Paris", ["Answer: B"], ["A"]),
    ("mmlu", "A, C", ["A, C", "C and A", "AC", "<answer>A. x, C. y</answer>"], ["A", "C", "A, B, C"]),
    ("mmlu", ["A", "C"], ["A, C"], ["A", "C"]),
]


@pytest.mark.parametrize(("name", "truth", "right", "wrong"), GRADED)
def test_right_and_wrong_answers(name, truth, right, wrong):
    assert [grade(name, truth, text).reward for text in right] == [1.0] * len(right)
    for score in (grade(name, truth, text) for text in wrong):
        assert (score.reward, score.accuracy, score.outcome) == (0.0, 0.0, Outcome.SCORED)
    made = grade(name, truth, load_answer_maker(name)(Prompt(0, name, "?", truth)))
    assert (made.reward, made.accuracy, made.outcome) == (1.0, 1.0, Outcome.SCORED)


UNREADABLE = [
    ("gsm8k math", "5", ["I do not know", "<think>It is \\boxed{5}", "<think>It is \\boxed{5}</think> Done."]),
    ("math", "5", ["", r"\boxed{}"]),
    ("exact", "the cat", ["<answer>the cat", "<answer></answer>", " "]),
    ("mmlu", "B", ["Who knows?"]),
    ("search search_f1", "Paris", ["", " ", "<answer></answer>"]),
]


@pytest.mark.parametrize(("names", "truth", "texts"), UNREADABLE)
def test_unreadable_answers(names, truth, texts):
    for score in (grade(name, truth, text) for name in names.split() for text in texts):
        assert (score.reward, score.accuracy, score.outcome) == (0.0, 0.0, Outcome.WRONG_FORMAT)


CHOICES = [
    (2, CITIES, "C"),
    (np.int64(0), CITIES, "A"),
    ("Paris", CITIES, "B"),
    ("fire", ARC, "B"),
    ("fire", LETTERS, "B"),
    ("sand", {"options": json.dumps(LETTERS["options"])}, "C"),
    (2, NUMBERS, "C"),
    ("2", NUMBERS, "A"),
    ("A", {"choices": 4}, "A"),
]


@pytest.mark.parametrize(("truth", "columns", "letters"), CHOICES)
def test_choices(truth, columns, letters):
    prompt = Prompt(0, "mmlu", "?", truth, columns)
    assert load_answer_maker("mmlu")(prompt) == f"<answer>{letters}</answer>"


ALL = "exact gsm8k math mmlu search"
REFUSED = [
    (ALL, None, {}, "None"),
    (ALL, " ", {}, "' '"),
    (ALL, [None, ""], {}, r"\[None, ''\]"),
    (ALL, {"solution": "x"}, {}, "'solution'.*target"),
    (ALL, [["a"], ["b"]], {}, r"\['a'\]"),
    ("exact gsm8k math search", float("nan"), {}, "nan"),
    ("exact gsm8k math search", [float("inf")], {}, "inf"),
    ("exact gsm8k math search", b"Paris", {}, "bytes"),
    ("search", '{"target": []}', {}, "target"),
    ("gsm8k", True, {}, "True"),
    ("gsm8k", "many", {}, "many.*has no number"),
    ("mmlu", 2, {}, "2 is not a letter.*choices"),
    ("mmlu", "Paris", {}, "Paris"),
    *(("mmlu", truth, columns, f"{truth}.*4 choices") for truth, columns in ((4, CITIES), (-1, CITIES))),
    *(("mmlu", truth, columns, f"{truth}.*4 choices") for truth, columns in (("5", NUMBERS), ("Oslo", CITIES))),
]


@pytest.mark.parametrize(("names", "truth", "columns", "shown"), REFUSED)
def test_other_truths_are_refused(names, truth, columns, shown):
    for name in names.split():
        prompt = Prompt(0, name, "?", truth, columns)
        for call in (load_answer_maker(name), lambda prompt: load_grader(prompt.data_source)(prompt, "x")):
            with pytest.raises(ValueError, match=shown):
                call(prompt)


ACCEPTED = [
    ("Paris", ["Paris"]),
    ('{"target": "Paris"}', ["Paris"]),
    ("{'target': array}", ["{'target': array}"]),
    (r"\{1, 2\}", [r"\{1, 2\}"]),
    (["a", 1.5, 10**30, 0.1], ["a", "1.5", str(10**30), "0.1"]),
    (0.123456789, ["0.123456789"]),
]


@pytest.mark.parametrize(("truth", "answers"), ACCEPTED)
def test_accepted_answers(truth, answers):
    assert read_accepted_answers(truth) == answers


NO_ANSWERS = [
    "Proof.",
    "N.A.",
    "not available",
    "TBD",
    r"\text{Proof omitted}",
    "(no answer)",
    "?",
    "See the solution.",
]


@pytest.mark.parametrize(("truths", "count"), [(NO_ANSWERS, 0), ([r"\pi", "{}", "NaCl", "-1", "undefined", "n+a"], 6)])
def test_other_spellings_of_no_answer(truths, count):
    prompts = [Prompt(id, "math", "?", truth) for id, truth in enumerate(["5", *truths])]
    assert len(leave_out_missing_answers(prompts, [])) == count + 1


BOXES = [" → ", " | ", r" \\ ", " oder ", " vs. ", " maybe ", r" \text{ or } ", " — ", " and/or ", "<br>"]


@pytest.mark.parametrize(("gap", "reward"), [*((gap, 0) for gap in BOXES), (". Wait, no: ", 1), (" + 1 = ", 1)])
def test_boxes_with_a_separator_are_one_answer(gap, reward):
    assert load_grader("math")(Prompt(0, "math", "?", "6"), rf"\boxed{{5}}{gap}\boxed{{6}}").reward == reward


THOUGHTS = [f"{mark}{{}}{end}" for mark, end in PAIRS.items()] + [
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
    "analysis{}assistantfinal",
    "<THINK>{}</think >",
]


@pytest.mark.parametrize("marks", THOUGHTS)
def test_a_thought_holds_no_answer(marks):
    grade, prompt = load_grader("math"), Prompt(0, "math", "?", "5")
    assert grade(prompt, marks.format(r"\boxed{4}") + " The answer is 5.").reward == 1
    assert grade(prompt, marks.format(r"\boxed{5}") + " The answer is 4.").reward == 0
    if not marks.startswith("analysis"):
        assert grade(prompt, marks.partition("}")[0][:-1] + r"\boxed{5}").reward == 0  # cut off


def test_rows_whose_ground_truth_stands_for_no_answer_are_left_out():
    """With a math grader. Another data source may have such a word as an answer."""
    truths = ["proof", "5", "NotFound", " N/A ", "6", None, "7", "no solution"]
    prompts = [Prompt(id, "AI-MO/NuminaMath-1.5", "?", truth) for id, truth in enumerate(truths)]
    prompts += [Prompt(8 + id, "multiple_choice", "?", truth) for id, truth in enumerate(["unknown", *"AAAAAB"])]
    findings = []
    assert [one.id for one in leave_out_missing_answers(prompts, findings)] == [1, 4, *range(5, 15)]
    found = {one.content.split("'")[1]: (one.effect.split()[0], one.rows, one.total) for one in findings}
    left_out = ("left", 1, 8)
    assert {name.strip(): value for name, value in found.items()} == {
        **dict.fromkeys(("proof", "NotFound", "N/A"), left_out),
        "unknown": ("kept,", 1, 7),
        "A": ("kept;", 5, 7),
    }
    with pytest.raises(ValueError, match="'proof', stand for no answer"):
        leave_out_missing_answers(prompts[:1], [])


def test_every_prompt_needs_a_grader_and_a_ground_truth():
    right, without_truth, unknown, unnamed = (
        Prompt(id, *values)
        for id, values in enumerate([("gsm8k", "?", "1"), ("gsm8k", "?"), ("poems", "?", "1"), ("", "?")])
    )
    check_prompts_are_gradable([right])
    for prompts, says in (
        ([right, without_truth], r"1 of 2 .*no ground truth.* row 1"),
        ([unknown], r"data_source 'poems'.*function\.path.*\*gsm8k\*"),
        ([unnamed], "rows without a data_source"),
    ):
        with pytest.raises(ValueError, match=says):
            check_prompts_are_gradable(prompts)
