"""Marks of thoughts that the text of an answer lacks."""

import pytest

from alphaapollo.data.rendering import Renderer
from alphaapollo.utils.thoughts import insert_marks, remove_thoughts
from tests.unit.data.conftest import CHATML

THINKING = "{% if message.thinking %}<|my_thought|>{{ message.thinking }}<|done|>{% endif %}{{ message.content }}"
OWN = CHATML.replace("{{ message.content }}", THINKING)


def find(tokenizer, answer: str, prompt: str = "?", special: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the text of an answer, and the text with marks."""
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]}, replace_extra_special_tokens=False)
    renderer = Renderer(tokenizer)
    prompt_ids, ids = renderer.encode([prompt, answer])
    text = renderer.decode(ids)
    return text, insert_marks(text, renderer.marks.find(prompt_ids, ids))


@pytest.mark.parametrize(
    ("answer", "special"),
    [
        ("[THINK]3 or 5[/THINK]4", ("[THINK]", "[/THINK]")),
        ("<|START_THINKING|>5<|END_THINKING|>4", ("<|START_THINKING|>", "<|END_THINKING|>")),
        (
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4",
            ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
        ),
    ],
)
def test_special_tokens(make_tokenizer, answer, special):
    text, marked = find(make_tokenizer(), answer + "<|im_end|>", special=special)
    assert not any(token in text for token in special)
    assert marked.replace("<|im_end|>", "") == answer and remove_thoughts(marked) == "4"


@pytest.mark.parametrize("special", [(), ("<|my_thought|>", "<|done|>")])
@pytest.mark.parametrize("prompt", ["", "assistant\n<|my_thought|>\n"])
def test_marks_of_the_chat_template(make_tokenizer, special, prompt):
    answer = "<|my_thought|>" * (not prompt) + "5<|done|>4"
    assert remove_thoughts(find(make_tokenizer(OWN), answer, prompt, special)[1]) == "4"
    assert remove_thoughts(find(make_tokenizer(OWN), answer.partition("<|done|>")[0], prompt, special)[1]) == ""


def test_a_prompt_that_opens_a_thought(make_tokenizer):
    assert find(make_tokenizer(), "5", "<|im_start|>assistant\n<think>\n") == ("5", "<think>5")
    assert find(make_tokenizer(), "5", "<think>\n\n</think>\n\n") == ("5", "5")
