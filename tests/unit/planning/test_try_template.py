import pytest

from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.planning.try_template import try_chats, try_template
from alphaapollo.types import Message, Prompt
from tests.unit.tiny import save_tokenizer

CHAT = [Message(role="system", content="Be short."), Message(role="user", content="2+2=?")]
SOUND = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


def attempt(tokenizer, template: str, **settings) -> None:
    tokenizer.chat_template = template
    try_template(Renderer(tokenizer), CHAT, **settings)


def test_valid_model_passes(tokenizer):
    attempt(tokenizer, SOUND)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>{% endfor %}",
            "does not show .*'system'",
        ),
        ("{{ messages[0].content }}", "does not show .*'user'"),
        ("{{ messages[-1].content }}", "does not show .*'system'"),
        ("{% for", "rejects a chat"),
        ("{{ missing.name }}", "rejects a chat"),
        ("{{ raise_exception('no system') }}", "rejects a chat .*no system"),
        ("{% for i in range(10**9) %}x{% endfor %}", "rejects a chat .*range"),
        ("{{ messages[99].content }}", "rejects a chat"),
        ("{{ 1 / 0 }}", "rejects a chat .*division"),
        ("{{ 'x' + 1 }}", "rejects a chat"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "rejects a chat .*recursion"),
    ],
)
def test_a_broken_template_is_refused(tokenizer, template, says):
    with pytest.raises(ValueError, match=says):
        attempt(tokenizer, template)


def test_server_that_does_not_end_is_killed(tokenizer):
    long = "{% for a in range(99999) %}{% for b in range(50) %}{% endfor %}{% endfor %}" + SOUND
    with pytest.raises(ValueError, match=r"did not render a chat within 0\.001 s"):
        attempt(tokenizer, long, time_limit=0.001)


def test_every_kind_of_chat_is_tried(tokenizer):
    tokenizer.chat_template = "{% for m in messages if m.role in ('user', 'system') %}{{ m.content }}{% endfor %}"
    developer = [Message(role="developer", content="Be short."), *CHAT[1:]]
    prompts = [
        Prompt(index, "", chat, location=f"d.jsonl, row {index}") for index, chat in enumerate((CHAT, developer))
    ]
    with pytest.raises(ValueError, match=r"d\.jsonl, row 1: .*'developer'"):
        try_chats(Renderer(tokenizer), prompts)
