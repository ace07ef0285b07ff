import pytest

from alphaapollo.rewards.answers import (
    find_answer_tag,
    find_boxed,
    find_marked_answer,
    find_text_after_hash_marks,
)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("5", [r"so \boxed{5}.", r"\boxed {5}", r"\fbox{5}", r"{ \boxed{5}", r"} \boxed{5}", r"\boxed{\boxed{5}}"]),
        ("2", [r"\boxed{1} then \boxed{2}"]),
        (r"\frac{1}{2}", [r"\boxed{\frac{1}{2}}"]),
        (r"\{1, 2\}", [r"\boxed{\{1, 2\}}"]),
        ("4", [r"\boxed{4} and \boxed{5"]),
        ("", [r"\boxed{}"]),
        (None, ["boxed{5}", ""]),
    ],
)
def test_last_boxed(content, texts):
    assert [find_boxed(text) for text in texts] == [content] * len(texts)


def test_many_open_boxes():
    assert find_boxed(r"\boxed{" * 300_000) is None


def test_answer_tag():
    texts = ["<answer> 5 </answer>", "<answer>1</answer><answer>\n2\n</answer>", "<answer>5", "5"]
    assert [find_answer_tag(text) for text in texts] == ["5", "2", None, None]


def test_after_hashes():
    texts = ["1+1=2\n#### 2", "#### 1\n#### 2\nmore", "####", "2"]
    assert [find_text_after_hash_marks(text) for text in texts] == ["2", "2", "", None]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"#### 1 \boxed{2} <answer>3</answer>", "3"),
        (r"<answer>so \boxed{3}</answer> \boxed{2}", "3"),
        (r"\boxed{2} #### 1", "2"),
        ("2\n#### 1", "1"),
        ("2", None),
    ],
)
def test_marks_rank_tag_box_hashes(text, content):
    assert find_marked_answer(text) == content
