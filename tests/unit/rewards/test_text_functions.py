"""What is read from a text: marked answers, numbers, letters, thoughts, prose, its language, and scores of its form."""

import json
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from alphaapollo.rewards.answers import (
    find_answer_tag,
    find_boxed,
    find_marked_answer,
    find_text_after_hash_marks,
)
from alphaapollo.rewards.components import (
    detect_language,
    extract_prose,
    score_distinct_ngrams,
    score_format,
    score_format_without_opening_tag,
    score_language,
    score_thoughts,
)
from alphaapollo.rewards.short_answers import (
    find_chosen_letters,
    grade_search,
    grade_search_f1,
    read_final_number,
)
from alphaapollo.types import Prompt
from alphaapollo.utils.thoughts import remove_thoughts, split_thoughts

DATA = Path(__file__).parents[2] / "data"

ENGLISH = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell?"
THOUGHTS = "First I look at how many clips were sold in May, which is half of what she sold in the month before."
ANSWER = "Together she sold all of the clips from April and those from May, so the answer is \\boxed{72}."
FRENCH = "D'abord, je calcule le nombre de pinces vendues en mai, puis j'additionne les deux mois."
CHINESE = "首先我们计算五月份卖了多少个,然后把两个数字加起来,所以答案是 \\boxed{72}。"
CHINESE_QUESTION = "求函数 $f(x)=x^2-2x+3$ 在给定区间上的最小值。"
NO_WORDS = "2 + 2 = ?"


def asked(question):
    """Score of the language of a completion, after a question."""
    return partial(score_language, Prompt(0, "math", question))


distinct_ngrams, format_score, format_opened, think_format = (
    partial(function, Prompt(0, "math", "?"))
    for function in (score_distinct_ngrams, score_format, score_format_without_opening_tag, score_thoughts)
)
MARKS = [
    (find_boxed, "5", [r"so \boxed{5}.", r"\boxed {5}", r"\fbox{5}", r"{ \boxed{5}", r"} \boxed{5}"]),
    (find_boxed, "5", [r"\boxed{\boxed{5}}"]),
    (find_boxed, "2", [r"\boxed{1} then \boxed{2}"]),
    (find_boxed, r"\frac{1}{2}", [r"\boxed{\frac{1}{2}}"]),
    (find_boxed, r"\{1, 2\}", [r"\boxed{\{1, 2\}}"]),
    (find_boxed, "4", [r"\boxed{4} and \boxed{5"]),
    (find_boxed, "", [r"\boxed{}"]),
    (find_boxed, None, ["boxed{5}", "", r"\boxed{" * 300_000]),
    (find_answer_tag, "5", ["<answer> 5 </answer>", "<answer>1</answer><answer>\n5\n</answer>"]),
    (find_answer_tag, None, ["<answer>5", "5"]),
    (find_text_after_hash_marks, "2", ["1+1=2\n#### 2", "#### 1\n#### 2\nmore"]),
    (find_text_after_hash_marks, "", ["####"]),
    (find_text_after_hash_marks, None, ["2"]),
    (find_marked_answer, "3", [r"#### 1 \boxed{2} <answer>3</answer>", r"<answer>so \boxed{3}</answer> \boxed{2}"]),
    (find_marked_answer, "2", [r"\boxed{2} #### 1"]),
    (find_marked_answer, "1", ["2\n#### 1"]),
    (find_marked_answer, None, ["2"]),
    (find_marked_answer, "1, 2", [r"\boxed{1} \quad \text{ or } \boxed{2}", r"<answer>\boxed{1}, \boxed{2}</answer>"]),
    (find_marked_answer, r"\{1\}, 2", [r"\(\boxed{\{1\}}\)" + "\n\n2. " + r"\(\boxed{2}\)"]),
    (remove_thoughts, "b", ["<think>a</think>b", "a</think>b", "b", "b<think>a", "<think>a</think>b<think>a</think>"]),
    (remove_thoughts, "<answer>b", ["<think>a<answer>b", "<think><answer>a</think><answer>b"]),
    (split_thoughts, ("a", "b"), ["<think>a</think>b", "a</think>b"]),
    (split_thoughts, ("a", ""), ["<think>a"]),
    (split_thoughts, ("", "b"), ["b"]),
    (split_thoughts, ("", ""), [""]),
    (split_thoughts, ("a", "b</think>c"), ["<think>a</think>b</think>c"]),
]
NUMBERS = [
    (72, ["#### 72"]),
    (1200, ["#### $1,200", r"\boxed{1.2 \times 10^{3}}"]),
    (1000, ["#### 1 000", "<answer>$1 000 a month</answer>", r"\boxed{1{,}000}", r"so $1\,000$", "#### 1e3"]),
    (-12, ["#### -12\nbye 5"]),
    (-5, ["x = -5", "(-5)", "-$5"]),
    (7, ["so she has 3 + 4 = 7 apples.", "<answer>\\boxed{7}</answer> 8"]),
    (3, ["5-3", "3 eggs", "3."]),
    (18, [r"\boxed{\$18}", "It is 18 (seen on 2024-05-31)."]),
    (Fraction(1, 2), [r"\boxed{\frac{1}{2}}", "1/2", ".5"]),
    (Fraction(-1, 2), [r"\boxed{-\frac{1}{2}}"]),
    (Fraction(1, 4), ["#### 2.5E-1"]),
    (Fraction(2469135, 2), ["1,234,567.50"]),
    (12345678, ["#### 12 345 678"]),
    (100, ["5 100"]),
    (2012, ["2024-12 = 2012"]),
    (50, ["50%"]),
    (None, ["1/0", "1e99999999999999", "1e201", "2024-05", "<answer>none</answer> 8", "no number", "", "3" * 5000]),
]
LETTERS = [
    ("B", ["B", "(b)", "B.", "B) Paris", "b", "**b**", "b) Paris"]),
    ("B", ["<answer>B</answer>", "<answer>B: Paris</answer>", "<answer>The answer is (B)</answer>"]),
    ("B", ["<answer>b</answer>", r"\boxed{B}", r"\boxed{\text{(B)}}", r"\boxed{\textbf{(B)}\ 12}"]),
    ("B", ["A is wrong, so the answer is B.", "The answer is b."]),
    ("B", ["B, because A is wrong", "B, A is wrong", "<answer>B. Paris, the capital</answer>"]),
    ("C", ["[C]", "The answer is **(C)**.", "First answer: A. No.\nFinal answer: C", "C is correct."]),
    ("C", ["Option C is correct", "Option A is wrong.\nOption C is the right one, for it is warm."]),
    ("A", ["The correct option is (a) since"]),
    ("D", ["Answer: D"]),
    ("J", ["Thinking of A and D.\nJ"]),
    ("AC", ["A, C", "AC", "C, A", "(A) and (C)", '["A", "C"]', "a, c", "A; C", "A and C are correct", "[A, C]"]),
    ("AC", ["The answers are A and C.", "<answer>AC</answer>", r"\boxed{A}, \boxed{C}", r"$\boxed{\text{A, C}}$"]),
    ("AC", ["The correct options are: A, C", "<answer>A. Paris, C. Rome</answer>", "Hm.\nA, C because of that"]),
    ("ABCD", ["A, B, C, and D", "ABCD"]),
    ("", ["A or B", "AA", "BAD dog", "A dog and a cat", "Option C is incorrect.", "b is for boy", "Both"]),
    ("", ["The answer is a dog", "A dog barks", "", "<answer></answer>"]),
]
FORMATS = [
    (1.0, [r"<think>2 + 2</think>So it is \boxed{4}.", "<think>2 + 2</think>\n<answer>4</answer>"]),
    (1.0, [r"<think>2 + 2</think><answer>\boxed{4}</answer>", r"<think></think>\boxed{\frac{1}{2}}"]),
    (1.0, ["\n <think>\n二加二\n</think> <answer>四</answer> ", r"<think>maybe \boxed{3}</think>\boxed{4}"]),
    (1.0, ["<think>" + "a b " * 25_000 + r"</think>\boxed{4}"]),
    # no answer after the thoughts
    (0.0, ["<think>2 + 2</think>", "<think>2 + 2</think>So it is 4.", r"<think>\boxed{4}</think>"]),
    (0.0, [r"<think>2</think>\boxed{ }", r"<think>2</think>\boxed{4", "<think>2</think><answer> </answer>"]),
    (0.0, ["<think></think>" + r"\boxed{" * 15_000]),
    # answer tags that are broken, or two
    (0.0, [r"<think>2 + 2</think><answer>\boxed{4}", r"<think>2 + 2</think>\boxed{4}</answer>"]),
    (0.0, ["<think>2</think></answer>4<answer>", "<think>2</think><answer>3</answer><answer>4</answer>"]),
    # think tags that are broken, not first, or twice
    (0.0, ["", r"\boxed{4}", r"<think>2 + 2 \boxed{4}", r"2 + 2</think>\boxed{4}", r"</think><think>\boxed{4}"]),
    (0.0, [r"Well. <think>2 + 2</think>\boxed{4}", r"<Think>2 + 2</Think>\boxed{4}", "<think>" * 15_000]),
    (1.0, [r"[THINK]2 + 2[/THINK]\boxed{4}", r"<|channel|>analysis<|message|>2 + 2<|end|>\boxed{4}"]),
    (0.0, [r"<think><think>2</think>\boxed{4}", r"<think>2</think></think>\boxed{4}"]),
    (0.0, [r"<think>2</think><think>2</think>\boxed{4}"]),
]
THINK_FORMATS = [  # of the test of TRL's think_format_reward
    (1.0, ["<think>This is my reasoning.</think>This is my answer.", "<think></think>\nThis is my answer."]),
    (1.0, ["<think>\nThis is my reasoning.\n</think>\nThis is my answer."]),
    (1.0, ["<think>\nThis is <some tag> my reasoning.</think>\nThis is my answer."]),
    (0.0, ["<think>\nThis is my reasoning.\nThis is my answer.", "<think>This is my reasoning.\nThis is my answer."]),
    (0.0, ["This is my reasoning.</think>\nThis is my answer.", "This is my reasoning.</think>This is my answer."]),
    (0.0, ["This<think>is my reasoning.</think>\nThis is my answer."]),
    (0.0, ["<think>This is<think>my reasoning.</think></think>This is my answer."]),
    (0.0, ["<think>This is</think>\nmy\n<think>reasoning.</think>\nThis is my answer."]),
]
LANGUAGES = [
    ("en", [THOUGHTS, THOUGHTS.upper()]),
    ("fr", [FRENCH]),
    ("de", ["Zuerst berechnen wir, wie viele sie im Mai verkauft hat, dann addieren wir."]),
    ("ru", ["Сначала найдём, сколько она продала в мае, а затем сложим оба числа."]),  # noqa: RUF001
    ("zh", ["首先我们计算五月份卖了多少个"]),
    ("ja", ["まず5月に売った数を計算します。"]),
    ("ko", ["먼저 5월에 판 개수를 계산합니다. 그런 다음 두 수를 더합니다."]),
    (None, ["", "The answer is 72.", "答案是七十二", "1 + 1 = 2, " * 100, "🙂" * 100]),
]
PROSE = [
    ("so and and and hold", ["so $x = y$ and $$a\n= b$$ and \\(c\\) and \\[d\n= e\\] hold"]),
    ("it costs and then more", ["it costs $5 and then $10 more"]),
    ("runs well", ["```python\nprint('hello')\n``` runs `f(x)` well"]),
    ("it ends in", ["it ends in ```python\nprint('hello')"]),
    ("is clear", ["\\begin{align*}\na &= b\\\\\n\\end{align*} is \\textbf{clear}"]),
    ("don't know", ["<answer>don't <b>know</b></answer>"]),
    ("été — naïve", ["été — naïve"]),
    ("an open and and align stay", ["an open $ and \\( and \\begin{align} stay"]),
]
SCORES = [
    (format_opened, 1.0, [r"2 + 2</think>\boxed{4}"]),
    (format_opened, 0.0, [r"<think>2 + 2</think>\boxed{4}", r"2 + 2 \boxed{4}"]),
    (asked(ENGLISH), 1.0, [f"<think>{THOUGHTS}</think>{ANSWER}", f"{THOUGHTS}</think>{ANSWER}", ANSWER]),
    (asked(ENGLISH), 1.0, [f"<think>{THOUGHTS}</think>\\boxed{{72}}"]),  # an answer without words
    (asked(ENGLISH), 0.0, [f"<think>{FRENCH}</think>{ANSWER}", f"<think>{THOUGHTS}</think>{FRENCH}"]),
    (asked(ENGLISH), 0.0, [f"<think>{FRENCH}</think>{FRENCH}", f"<think>{FRENCH}"]),
    (asked(ENGLISH), 0.0, [f"<think>{CHINESE}</think>{ANSWER}"]),
    (asked(ENGLISH), 0.0, ["", "<think></think>", "<think>24 + 48 = 72</think>\\boxed{72}"]),  # nothing is said
    (asked(FRENCH), 1.0, [f"<think>{FRENCH}</think>{FRENCH}"]),
    (asked(FRENCH), 0.0, [f"<think>{THOUGHTS}</think>{FRENCH}"]),
    (asked(CHINESE_QUESTION), 0.0, [f"<think>{THOUGHTS}</think>{CHINESE}"]),
    (asked(NO_WORDS), 1.0, [f"<think>{THOUGHTS}</think>{ANSWER}"]),
    (asked(NO_WORDS), 0.0, [f"<think>{FRENCH}</think>{ANSWER}"]),
    (distinct_ngrams, 1.0, ["", "one two three", "one two three four five"]),
    (distinct_ngrams, 1.0, ["x中y x中y"]),  # 6 words: x中yx 中yxx yxx.. differ
    (distinct_ngrams, 1 / 2, ["a a a a a"]),  # 2 4-grams, both alike
    (distinct_ngrams, 4 / 5, ["a b c d a b c d"]),  # abcd bcda cdab dabc abcd
    (distinct_ngrams, 4 / 9, ["x = 1; x = 1; x = 1;"]),  # 12 words: 9 4-grams of a period of 4
    (distinct_ngrams, 2 / 3, ["我们我们我们"]),  # 6 words: 我们我们 们我们我 我们我们
    (distinct_ngrams, 1 / 3, ["да да да да да да"]),
    (distinct_ngrams, pytest.approx(0.0, abs=1e-3), ["wait, let me check again. " * 4_000, "?" * 100_000]),
]
TABLES = {
    read_final_number: NUMBERS,
    find_chosen_letters: LETTERS,
    format_score: FORMATS,
    think_format: THINK_FORMATS,
    detect_language: LANGUAGES,
    extract_prose: PROSE,
}
ROWS = [*MARKS, *SCORES, *((function, *row) for function, rows in TABLES.items() for row in rows)]


@pytest.mark.parametrize(("function", "value", "texts"), ROWS)
def test_texts_have_this_value(function, value, texts):
    assert [function(text) for text in texts] == [value] * len(texts)


def test_question_is_the_user_messages():
    chat = [{"role": "system", "content": THOUGHTS}, {"role": "user", "content": FRENCH}]
    assert asked(chat)(f"<think>{FRENCH}</think>{FRENCH}") == 1.0


def test_real_english_questions_are_recognized():
    lines = [line for path in DATA.glob("gsm8k_*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    assert [detect_language(json.loads(line)["question"]) for line in lines] == ["en"] * 28


PARTLY_RIGHT = [
    ("<answer>The city of light.</answer> or not", 1.0, 1.0),
    ("paris", 1.0, 1.0),
    ("<answer>city of lights</answer>", 0.0, 2 / 3),  # 2 of its 3 words, and 2 of 3 of "city of light"
    ("It is Paris in France", 0.0, 1 / 3),  # 1 of 5 words, and the 1 word of "Paris": 2 * 1 / (5 + 1)
    ("London", 0.0, 0.0),
    ("?!", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "exact", "f1"), PARTLY_RIGHT)
def test_the_best_accepted_answer_counts(text, exact, f1):
    score, score_f1 = (
        grade(Prompt(0, "", "?", '["Paris", "City of Light"]'), text) for grade in (grade_search, grade_search_f1)
    )
    assert (score.reward, score.accuracy, score.components["f1"]) == (exact, exact, pytest.approx(f1, rel=1e-12))
    assert (score_f1.reward, score_f1.accuracy) == (pytest.approx(f1, rel=1e-12), exact)
