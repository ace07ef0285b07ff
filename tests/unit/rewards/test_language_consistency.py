import json
from pathlib import Path

import pytest

from alphaapollo.rewards.components import detect_language, extract_prose, score_language
from alphaapollo.types import Prompt

DATA = Path(__file__).parents[2] / "data"

ENGLISH = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell?"
THOUGHTS = "First I look at how many clips were sold in May, which is half of what she sold in the month before."
ANSWER = "Together she sold all of the clips from April and those from May, so the answer is \\boxed{72}."
FRENCH = "D'abord, je calcule le nombre de pinces vendues en mai, puis j'additionne les deux mois."
CHINESE = "首先我们计算五月份卖了多少个,然后把两个数字加起来,所以答案是 \\boxed{72}。"
CHINESE_QUESTION = "求函数 $f(x)=x^2-2x+3$ 在给定区间上的最小值。"


def score(asked, completion):
    return score_language(Prompt(id=0, data_source="math", content=asked), completion)


NO_WORDS = "2 + 2 = ?"


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        (ENGLISH, [f"<think>{THOUGHTS}</think>{ANSWER}", f"{THOUGHTS}</think>{ANSWER}", ANSWER], [""]),
        (ENGLISH, [f"<think>{THOUGHTS}</think>\\boxed{{72}}"], ["<think></think>"]),  # an answer without words
        (ENGLISH, [], [f"<think>{FRENCH}</think>{ANSWER}", f"<think>{THOUGHTS}</think>{FRENCH}"]),
        (ENGLISH, [], [f"<think>{FRENCH}</think>{FRENCH}", f"<think>{FRENCH}", f"<think>{CHINESE}</think>{ANSWER}"]),
        (ENGLISH, [], ["<think>24 + 48 = 72</think>\\boxed{72}"]),  # nothing is said
        (FRENCH, [f"<think>{FRENCH}</think>{FRENCH}"], [f"<think>{THOUGHTS}</think>{FRENCH}"]),
        (CHINESE_QUESTION, [f"<think>{CHINESE}</think>{CHINESE}"], [f"<think>{THOUGHTS}</think>{CHINESE}"]),
        (NO_WORDS, [f"<think>{THOUGHTS}</think>{ANSWER}"], [f"<think>{FRENCH}</think>{ANSWER}"]),
    ],
)
def test_question_thoughts_and_answer(asked, right, wrong):
    assert [score(asked, completion) for completion in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)


def test_question_is_the_user_messages():
    chat = [{"role": "system", "content": THOUGHTS}, {"role": "user", "content": FRENCH}]
    assert score(chat, f"<think>{FRENCH}</think>{FRENCH}") == 1.0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", THOUGHTS),
        ("fr", FRENCH),
        ("es", "Primero calculamos cuántos vendió en mayo y después sumamos los dos números."),
        ("it", "Prima calcoliamo quante ne ha vendute a maggio, poi sommiamo i due numeri."),
        ("de", "Zuerst berechnen wir, wie viele sie im Mai verkauft hat, dann addieren wir."),
        ("pt", "Primeiro calculamos quantos vendeu em maio e depois somamos os dois números."),
        ("ru", "Сначала найдём, сколько она продала в мае, а затем сложим оба числа."),  # noqa: RUF001
        ("zh", "首先我们计算五月份卖了多少个"),
        ("ja", "まず5月に売った数を計算します。"),
        ("ko", "먼저 5월에 판 개수를 계산합니다. 그런 다음 두 수를 더합니다."),
        ("ar", "أولا نحسب عدد المشابك التي باعتها في مايو ثم نجمع العددين."),
        ("hi", "पहले हम मई में बेचे गए क्लिप की गणना करते हैं और फिर दोनों संख्याओं को जोड़कर उत्तर लिखते हैं।"),
        ("en", THOUGHTS.upper()),
        (None, ""),
        (None, "The answer is 72."),
        (None, "答案是七十二"),
        (None, "1 + 1 = 2, " * 100),
        (None, "🙂" * 100),
    ],
)
def test_languages(code, text):
    assert detect_language(text) == code


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("so $x = y$ and $$a\n= b$$ and \\(c\\) and \\[d\n= e\\] hold", "so and and and hold"),
        ("it costs $5 and then $10 more", "it costs and then more"),
        ("```python\nprint('hello')\n``` runs `f(x)` well", "runs well"),
        ("it ends in ```python\nprint('hello')", "it ends in"),
        ("\\begin{align*}\na &= b\\\\\n\\end{align*} is \\textbf{clear}", "is clear"),
        ("<answer>don't <b>know</b></answer>", "don't know"),
        ("été — naïve", "été — naïve"),
        ("an open $ and \\( and \\begin{align} stay", "an open and and align stay"),
    ],
)
def test_prose_is_what_is_not_code_or_latex(text, words):
    assert extract_prose(text) == words


@pytest.mark.parametrize(
    "piece",
    ["\\(", "\\[", "`", "```", "$", "$a", "$ a", "$$a", "\\begin{", "\\begin{a}", "<", "<a", "{", "\\", "中", "é "],
)
def test_long_repetitions_end(piece):
    assert score(ENGLISH, piece * (1_000_000 // len(piece))) == 0.0


def test_real_english_questions_are_recognized():
    lines = [line for path in DATA.glob("gsm8k_*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    assert [detect_language(json.loads(line)["question"]) for line in lines] == ["en"] * 28
