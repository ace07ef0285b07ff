"""Prompts that are texts, and templates that write the date."""

import pytest

from alphaapollo.data.prompts import list_text_notices
from alphaapollo.data.rendering import Renderer


class BosTokenizer:
    """Tokenizer that adds BOS to texts, as Llama's does."""

    bos_token, bos_token_id, eos_token = "<s>", 1, "</s>"

    def __init__(self, chat_template=None):
        self.added_tokens_encoder = {"<s>": 1, "</s>": 2, "<|user|>": 3}
        self.chat_template = chat_template

    def __call__(self, texts, add_special_tokens, **_):
        return {"input_ids": [[1] * add_special_tokens + [7] * len(text) for text in texts]}


TEXTS = [
    ("a", None, []),
    ("<s>a</s>\n", None, ["</s>"]),
    ("a", "{{ messages }}", ["role"]),
    ("<|user|>a", "{{ messages }}", []),
]


@pytest.mark.parametrize(("text", "template", "words"), TEXTS)
def test_texts(text, template, words):
    notices = list_text_notices([text], Renderer(BosTokenizer(template)))
    assert len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices, strict=True))
