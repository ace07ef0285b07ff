"""Parsers against chat templates: vLLM's own, and transformers' response templates."""

import json

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.rollout.call_reader import check_call_reader, make_call_reader
from alphaapollo.tools.written_calls import Call, UnreadableCallError
from tests.unit.tool_templates import (
    MISTRAL,
    MISTRAL_TOKENS,
    ONE_CALL,
    RESPONSE_TEMPLATE,
    call,
    schema,
    tokenizer_of,
)

ADD = schema("add", a="integer", note="string")
ONE = call("add", a=1)


def reader(parser, template=None, tools=(ADD,)):
    tokenizer = tokenizer_of() if template is None else tokenizer_of(template)
    tokenizer.response_template = None if parser else RESPONSE_TEMPLATE
    return make_call_reader(parser, ToolRenderer(tokenizer, list(tools)))


@pytest.fixture(params=["hermes", ""], ids=["vllm", "transformers"], scope="module")
def read(request):
    if request.param:
        pytest.importorskip("vllm")
    return reader(request.param)


def arguments(found: list[Call]) -> list[tuple[str, dict]]:
    return [(one.name, json.loads(one.arguments)) for one in found]


def test_calls_in_their_order(read):
    other = call("other", b="</tool_cal>")
    assert arguments(read(f"Let me see.\n{ONE}\n{other}")) == [("add", {"a": 1}), ("other", {"b": "</tool_cal>"})]


def test_a_text_without_a_call_is_an_answer(read):
    for text in ("42", "", "<think>add?</think> \\boxed{42}", "<think>never ends", "{" * 99, '{"name": "add"}'):
        assert read(text) == []


def test_calls_in_thoughts_are_not_made(read):
    assert arguments(read(f"<think>{call('add', a=2)}?</think>{ONE}")) == [("add", {"a": 1})]
    assert read(f"<think>{ONE}</think>no") == []


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1',  # cut off
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',  # a brace is missing
        "<tool_call>\nadd(a=1)\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>" * 2000,
    ],
)
def test_what_cannot_be_read_is_no_answer(read, text):
    with pytest.raises(UnreadableCallError, match="cannot be read"):
        read(text)


def test_a_megabyte_is_read(read):
    (found,) = read(call("add", note="x" * (1 << 20)))
    assert len(found.arguments) > 1 << 20


def test_several_calls_where_the_template_knows_one():
    read = reader("", ONE_CALL)
    assert len(read(ONE)) == 1
    with pytest.raises(UnreadableCallError, match="make one a turn"):
        read(f"{ONE}\n{ONE}")


def test_a_response_template_that_does_not_fit_the_template():
    tokenizer = tokenizer_of(MISTRAL, MISTRAL_TOKENS)
    tokenizer.response_template = RESPONSE_TEMPLATE
    with pytest.raises(
        ValueError, match=r"response_template does not read what the chat template writes: .*TOOL_CALLS"
    ):
        make_call_reader("", ToolRenderer(tokenizer, [ADD]))


def test_parsers_that_will_not_do_are_refused_with_those_that_do():
    pytest.importorskip("vllm")
    with pytest.raises(ValueError, match=r"no such parser\. Did you mean hermes.*Known: .*qwen3_xml"):
        reader("hermess")
    with pytest.raises(ValueError, match=r"it does not work with this tokenizer: .*token"):
        reader("mistral")
    with pytest.raises(ValueError, match=r"tool_parser=pythonic does not read .*Those that.*tool_parser=hermes"):
        reader("pythonic")
    with pytest.raises(ValueError, match=r"no response_template.*env\.tool_parser=hermes"):
        make_call_reader("", ToolRenderer(tokenizer_of(), [ADD]))


def test_special_tokens_of_a_format_reach_its_parser():
    pytest.importorskip("vllm")
    renderer = ToolRenderer(tokenizer_of(MISTRAL, MISTRAL_TOKENS), [ADD])
    read = make_call_reader("mistral", renderer)
    text = renderer.decode(renderer.encode([renderer.written("add", {"a": 5, "note": "y"})])[0])
    assert text.startswith("[TOOL_CALLS]")
    assert arguments(read(text)) == [("add", {"a": 5, "note": "y"})]


def test_the_check_before_the_start_brings_the_reason_home(tmp_path):
    tokenizer = tokenizer_of()
    tokenizer.response_template = RESPONSE_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    native = Env(action_format="chat_template")
    check_call_reader(native, str(tmp_path), False, [ADD])
    with pytest.raises(ValueError, match="no such folder"):
        check_call_reader(native, str(tmp_path / "none"), False, [ADD])
