from datetime import date
from types import SimpleNamespace

import pytest

from alphaapollo.config.schema import SftConfig
from alphaapollo.data.rendering import Renderer, check_chat_is_shown
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.planning import template as module
from alphaapollo.planning.template import fix_template_date, try_chats
from alphaapollo.types import Message, Prompt
from tests.unit.tiny import save_tokenizer

CHAT = [Message(role="system", content="Be short."), Message(role="user", content="2+2=?")]
SOUND = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


def attempt(tokenizer, template: str) -> None:
    tokenizer.chat_template = template
    check_chat_is_shown(CHAT, Renderer(tokenizer))


BROKEN_TEMPLATES = [
    ("{% for m in messages %}<{{ m.role }}>{% endfor %}", "does not show .*'system'"),
    ("{{ messages[0].content }}", "does not show .*'user'"),
    ("{% for", "rejects a chat"),
    ("{{ raise_exception('no system') }}", "rejects a chat .*no system"),
    ("{% for i in range(10**9) %}x{% endfor %}", "rejects a chat .*range"),
    ("{{ 1 / 0 }}", "rejects a chat .*division"),
    ("{{ 'x' * 10**15 }}", "rejects a chat .*MemoryError"),
    ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "rejects a chat .*recursion"),
]


@pytest.mark.parametrize(("template", "says"), BROKEN_TEMPLATES)
def test_a_broken_template_is_refused(tokenizer, template, says):
    with pytest.raises(ValueError, match=says):
        attempt(tokenizer, template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 99 }}",
    ],
)
def test_a_template_without_end_is_run_once(tokenizer, template, monkeypatch):
    monkeypatch.setattr("alphaapollo.data.chat_template.MAX_SECONDS", 0.2)
    monkeypatch.setattr("alphaapollo.data.chat_template.MAX_CHARS", 90)
    with pytest.raises(ValueError, match=f"{tokenizer.name_or_path}.*(0.2 seconds|99 characters)"):
        attempt(tokenizer, template)
    monkeypatch.setattr("alphaapollo.data.chat_template.MAX_SECONDS", 9999)  # the test would hang
    with pytest.raises(ValueError, match=r"9999 seconds"):
        attempt(tokenizer, template)
    attempt(tokenizer, SOUND)


def test_every_kind_of_chat_is_tried(tokenizer):
    tokenizer.chat_template = "{% for m in messages if m.role in ('user', 'system') %}{{ m.content }}{% endfor %}"
    developer = [Message(role="developer", content="Be short."), *CHAT[1:]]
    prompts = [
        Prompt(index, "", chat, location=f"d.jsonl, row {index}") for index, chat in enumerate((CHAT, developer))
    ]
    with pytest.raises(ValueError, match=r"d\.jsonl, row 1: .*'developer'"):
        try_chats(Renderer(tokenizer), prompts)


@pytest.mark.parametrize("has_date", [True, False])
def test_a_run_keeps_the_day_of_its_first_start(tmp_path, tokenizer, monkeypatch, has_date):
    tokenizer.chat_template = "{{ strftime_now('%d') }}" if has_date else SOUND
    tokenizer.save_pretrained(tmp_path / "model")
    config = SftConfig(model={"path": str(tmp_path / "model")}, trainer={"output_dir": str(tmp_path)})
    monkeypatch.setattr(module, "date", SimpleNamespace(today=lambda: date(2026, 7, 26)))
    first = fix_template_date(config, config.model)
    arguments = first.data.apply_chat_template_kwargs
    assert arguments == ({"strftime_now": "2026-07-26"} if has_date else {})
    monkeypatch.setattr(module, "date", SimpleNamespace(today=lambda: date(2026, 7, 27)))
    assert fix_template_date(first, config.model) is first
    monkeypatch.setattr(module, "read_earlier_config", lambda config: first.model_dump())
    assert fix_template_date(config, config.model) == first
