"""Prompts that are texts, and templates that write the date."""

import pytest

from alphaapollo.data.prompts import prepare_texts
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.types import Prompt
from tests.unit.tiny import save_tokenizer


class BosTokenizer:
    """Tokenizer that adds BOS to texts, as Llama's does."""

    bos_token, bos_token_id, eos_token = "<s>", 1, "</s>"

    def __init__(self, chat_template=None):
        self.added_tokens_encoder = {"<s>": 1, "</s>": 2, "<|user|>": 3}
        self.chat_template = chat_template

    def __call__(self, texts, add_special_tokens, **_):
        return {"input_ids": [[1] * add_special_tokens + [7] * len(text) for text in texts]}


def prepare(*texts, chat_template=None):
    prompts = [Prompt(index, "", text) for index, text in enumerate(texts)]
    prepared, notices = prepare_texts(prompts, Renderer(BosTokenizer(chat_template)))
    return [prompt.content for prompt in prepared], notices


TEXTS = [
    ("a", "a", None, []),
    ("<s>a", "a", None, ["<s>"]),
    ("a</s>", "a</s>", None, ["</s>"]),
    ("<s>a</s>\n", "a</s>\n", None, ["<s>", "</s>"]),
    ("a", "a", "{{ messages }}", ["role"]),
    ("<|user|>a", "<|user|>a", "{{ messages }}", []),
]


@pytest.mark.parametrize(("text", "prepared", "template", "words"), TEXTS)
def test_texts(text, prepared, template, words):
    contents, notices = prepare(text, chat_template=template)
    assert contents == [prepared] and len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices, strict=True))


def test_chats_and_a_tokenizer_without_bos(tmp_path):
    save_tokenizer(tmp_path)
    chats = [Prompt(0, "", [{"role": "user", "content": "<s>"}])]
    assert prepare_texts(chats, Renderer(load_tokenizer(str(tmp_path)))) == (chats, [])
