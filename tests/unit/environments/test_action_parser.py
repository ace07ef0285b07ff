import pytest

from alphaapollo.environments.action_parser import Action, read_action
from alphaapollo.types import Completion, StopReason, Turn


@pytest.mark.parametrize(
    ("text", "content", "kept"),
    [
        ("<answer>7</answer>", "7", None),
        ("so <answer>7</answer> then", "7", "so <answer>7</answer>"),
        ("<answer>7</answer><answer>8</answer>", "7", "<answer>7</answer>"),
        ("<think><answer>1</answer></think><answer>2</answer>", "2", None),
        ("<answer>1</answer></think><answer>2</answer>", "2", None),  # the prompt opened the thought
        ("<answer>1</answer><think>hm</think><answer>2</answer>", "1", "<answer>1</answer>"),
        ("<answer>a <b> c</answer>", "a <b> c", None),
    ],
)
def test_first_complete_action(text, content, kept):
    assert read_action(text) == Action("answer", content, None if kept is None else len(kept))


@pytest.mark.parametrize(
    "text", ["", "7", "<answer>7", "7</answer>", "<think><answer>7</answer>", "<ANSWER>7</ANSWER>", "</think>"]
)
def test_no_action(text):
    assert read_action(text) == Action(error="no action; write <answer>...</answer>")


@pytest.mark.parametrize(
    ("text", "marks", "content", "kept"),
    [
        ("<answer>1</answer> so <answer>2</answer>!", [(0, "[THINK]"), (21, "[/THINK]")], "2", 40),
        ("<answer>1</answer> so", [(0, "<think>")], "", None),  # the prompt opened the thought
    ],
)
def test_marks_that_the_text_lacks(text, marks, content, kept):
    turn = Turn([], Completion([], [], StopReason.STOP, 0), text, marks=marks)
    action = read_action(text, turns=[turn])
    assert (action.content, action.kept_chars, bool(action.error)) == (content, kept, not content)


def test_several_kinds_of_action():
    tags = ["python_code", "answer"]
    assert read_action("<python_code>1+1</python_code>", tags) == Action("python_code", "1+1", None)
    both = read_action("<python_code>1+1</python_code> so <answer>2</answer>", tags)
    assert both == Action(error="several kinds of action at once (python_code, answer); make one")
    thought = "<think><answer>2</answer></think><python_code>1+1</python_code>"
    assert read_action(thought, tags) == Action("python_code", "1+1", None)
    assert read_action("what?", tags) == Action(
        error="no action; write <python_code>...</python_code> or <answer>...</answer>"
    )


@pytest.mark.parametrize(
    ("text", "word", "kept"),
    [
        ("up", "up", None),
        ("  Up! I say", "Up", 5),
        ("<think>left?</think>\n50.\n", "50", None),
        ("well</think> right now", "right", 18),
    ],
)
def test_bare_word(text, word, kept):
    found = read_action(text, allow_bare_word=True)
    assert isinstance(found, Action) and (found.content, found.kept_chars) == (word, kept)


@pytest.mark.parametrize("text", ["<answer>" * 130_000, "<think>" * 150_000, "<a><answer>" * 90_000])
def test_a_megabyte_of_tags_takes_linear_time(text):
    """Quadratic time would be minutes."""
    assert read_action(text, ["a", "answer"]).error
    read_action(text + "<think></think>" * 70_000 + "x", ["a", "answer"], allow_bare_word=True)
