"""Parsers against chat templates: vLLM's own, and transformers' response templates."""

import json

import pytest

from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.rollout.tool_call_parser import make_tool_call_parser
from alphaapollo.tools.base import ToolCall, ToolCallParseError
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


def reader(parser, *template, tools=(ADD,)):
    tokenizer = tokenizer_of(*template)
    tokenizer.response_template = None if parser else RESPONSE_TEMPLATE
    return make_tool_call_parser(parser, ToolRenderer(tokenizer, list(tools)))


@pytest.fixture(params=["hermes", ""], ids=["vllm", "transformers"], scope="module")
def read(request):
    if request.param:
        pytest.importorskip("vllm")
    return reader(request.param)


def arguments(found: list[ToolCall]) -> list[tuple[str, dict]]:
    return [(one.name, json.loads(one.arguments)) for one in found]


def test_calls_in_their_order(read):
    other = call("other", b="</tool_cal>")
    assert arguments(read(f"Let me see.\n{ONE}\n{other}")) == [("add", {"a": 1}), ("other", {"b": "</tool_cal>"})]


def test_a_text_without_a_call_is_an_answer(read):
    for text in ("42", "", "<think>add?</think> \\boxed{42}", "<think>never ends", "{" * 99, '{"name": "add"}'):
        assert read(text) == []


def test_calls_in_thinking_are_ignored(read):
    assert arguments(read(f"<think>{call('add', a=2)}?</think>{ONE}")) == [("add", {"a": 1})]
    assert read(f"<think>{ONE}</think>no") == read(f"[THINK]{ONE}[/THINK]no") == read(f"<reasoning>{ONE}") == []


def test_the_model_reads_why_a_call_cannot_be_parsed(read):
    with pytest.raises(ToolCallParseError, match=r"Expecting ',' delimiter.*\n.*\"name\": \"add\""):
        read('<tool_call>\n{"name": "add" "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1',  # cut off
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',  # a brace is missing
        "<tool_call>\nadd(a=1)\n</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_malformed_call_is_not_an_answer(read, text):
    with pytest.raises(ToolCallParseError, match="cannot be parsed"):
        read(text)


def test_several_calls_with_a_single_call_template():
    read = reader("", ONE_CALL)
    assert len(read(ONE)) == 1
    with pytest.raises(ToolCallParseError, match="Make one call per turn"):
        read(f"{ONE}\n{ONE}")


def test_a_response_template_that_does_not_fit_the_template():
    tokenizer = tokenizer_of(MISTRAL, MISTRAL_TOKENS)
    tokenizer.response_template = RESPONSE_TEMPLATE
    with pytest.raises(ValueError, match=r"response_template .*TOOL_CALLS"):
        make_tool_call_parser("", ToolRenderer(tokenizer, [ADD]))


def test_unsuitable_parser_error_names_suitable_ones():
    pytest.importorskip("vllm")
    for parser, facts in (
        ("hermess", r"hermess.*qwen3_xml"),
        ("mistral", r"mistral.*token"),
        ("pythonic", r"pythonic .*tool_parser=hermes"),
    ):
        with pytest.raises(ValueError, match=facts):
            reader(parser)
    with pytest.raises(ValueError, match=r"response_template.*tool_parser=hermes"):
        make_tool_call_parser("", ToolRenderer(tokenizer_of(), [ADD]))


def test_special_tokens_of_a_format_reach_its_parser():
    pytest.importorskip("vllm")
    renderer = ToolRenderer(tokenizer_of(MISTRAL, MISTRAL_TOKENS), [ADD])
    read = make_tool_call_parser("mistral", renderer)
    text = renderer.decode(renderer.encode([renderer.render_call("add", {"a": 5, "note": "y"})])[0])
    assert text.startswith("[TOOL_CALLS]")
    assert arguments(read(text)) == [("add", {"a": 5, "note": "y"})]
