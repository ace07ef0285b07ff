import pytest

from alphaapollo.rewards.components import score_format, score_format_without_opening_tag, split_thoughts
from alphaapollo.types import Prompt

PROMPT = Prompt(0, "math", "?")


@pytest.mark.parametrize(
    ("reward", "texts"),
    [
        (1.0, [r"<think>2 + 2</think>So it is \boxed{4}.", "<think>2 + 2</think>\n<answer>4</answer>"]),
        (1.0, [r"<think>2 + 2</think><answer>\boxed{4}</answer>", r"<think></think>\boxed{\frac{1}{2}}"]),
        (1.0, ["\n <think>\n二加二\n</think> <answer>四</answer> ", r"<think>maybe \boxed{3}</think>\boxed{4}"]),
        # no answer after the thoughts
        (0.0, ["<think>2 + 2</think>", "<think>2 + 2</think>So it is 4.", r"<think>\boxed{4}</think>"]),
        (0.0, [r"<think>2</think>\boxed{ }", r"<think>2</think>\boxed{4", "<think>2</think><answer> </answer>"]),
        # answer tags that are broken, or two
        (0.0, [r"<think>2 + 2</think><answer>\boxed{4}", r"<think>2 + 2</think>\boxed{4}</answer>"]),
        (0.0, ["<think>2</think></answer>4<answer>", "<think>2</think><answer>3</answer><answer>4</answer>"]),
        # think tags that are broken, not first, or twice
        (0.0, ["", r"\boxed{4}", r"<think>2 + 2 \boxed{4}", r"2 + 2</think>\boxed{4}", r"</think><think>\boxed{4}"]),
        (0.0, [r"Well. <think>2 + 2</think>\boxed{4}", r"<Think>2 + 2</Think>\boxed{4}"]),
        (0.0, [r"<think><think>2</think>\boxed{4}", r"<think>2</think></think>\boxed{4}"]),
        (0.0, [r"<think>2</think><think>2</think>\boxed{4}"]),
    ],
)
def test_think_then_answer(reward, texts):
    assert [score_format(PROMPT, text) for text in texts] == [reward] * len(texts)


def test_think_opened_by_the_template():
    assert score_format_without_opening_tag(PROMPT, r"2 + 2</think>\boxed{4}") == 1.0
    assert score_format_without_opening_tag(PROMPT, r"<think>2 + 2</think>\boxed{4}") == 0.0
    assert score_format_without_opening_tag(PROMPT, r"2 + 2 \boxed{4}") == 0.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("a</think>b", ("a", "b")),
        ("<think>a", ("a", "")),
        ("b", ("", "b")),
        ("", ("", "")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
    ],
)
def test_thoughts_and_answer(text, parts):
    assert split_thoughts(text) == parts


def test_long_texts():
    assert score_format(PROMPT, "<think>" + "a b " * 25_000 + r"</think>\boxed{4}") == 1.0
    assert score_format(PROMPT, "<think>" * 15_000) == 0.0
    assert score_format(PROMPT, "<think></think>" + r"\boxed{" * 15_000) == 0.0
