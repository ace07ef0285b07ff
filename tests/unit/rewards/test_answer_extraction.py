import time

import pytest

from alphaapollo.rewards.answer_extraction import (
    find_answer_tag,
    find_boxed,
    find_marked_answer,
    find_text_after_hash_marks,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{4} and \boxed{5", "4"),
        (r"{ \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert find_boxed(text) == content


def test_many_open_boxes_are_read_in_linear_time():
    start = time.process_time()
    assert find_boxed(r"\boxed{" * 100_000) is None
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>1</answer><answer>\n2\n</answer>", "2"),
        ("<answer>5", None),
        ("5", None),
    ],
)
def test_answer_tag(text, content):
    assert find_answer_tag(text) == content


@pytest.mark.parametrize(
    ("text", "content"), [("1+1=2\n#### 2", "2"), ("#### 1\n#### 2\nmore", "2"), ("####", ""), ("2", None)]
)
def test_after_hashes(text, content):
    assert find_text_after_hash_marks(text) == content


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
