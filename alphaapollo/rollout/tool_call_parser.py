"""Select the parser of a model's native tool calls (env.action_format=chat_template), and test that it can parse the
calls that the chat template renders. For env.action_format=tags see environments/action_parser.py."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable

from alphaapollo.data.tool_rendering import QUESTION, ToolRenderer
from alphaapollo.tools.base import ToolCall, ToolCallParseError, ToolCallParser
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.thoughts import split_open_mark, split_thoughts

Parse = Callable[[str], list[ToolCall]]
"""Tool-call parser of vLLM or a tokenizer. For malformed text it may raise any exception or return an empty list."""


def make_tool_call_parser(parser_name: str, renderer: ToolRenderer) -> ToolCallParser:
    """Build the tool-call parser: vLLM's parser with this name or, if the name is empty, a parser from the tokenizer's
    response_template. Raises ValueError if the parser does not parse the calls that the chat template renders. The
    message names the parsers that do."""
    parse = _make_vllm_parser(parser_name, renderer) if parser_name else _make_tokenizer_parser(renderer)
    parse_calls = _make_strict_parser(parse, renderer)
    if mismatch := _describe_mismatch(parse_calls, renderer):
        parser = f"env.tool_parser={parser_name}" if parser_name else "the tokenizer's response_template"
        raise ValueError(
            f"{parser} cannot parse the tool calls that the chat template renders: {mismatch}. "
            f"{_suggest_parsers(renderer)}"
        )
    return parse_calls


def _make_strict_parser(parse: Parse, renderer: ToolRenderer) -> ToolCallParser:
    """Wrap a parser so that for any text it returns the calls outside of thoughts or raises ToolCallParseError."""
    call_prefix, supports_parallel = renderer.call_prefix, renderer.supports_parallel_calls

    def parse_calls(text: str) -> list[ToolCall]:
        _, answer = split_thoughts(text)
        try:
            calls, reason = parse(answer), ""
        except Exception as error:  # noqa: BLE001  parsers raise arbitrary exceptions for malformed text
            calls, reason = [], f" ({type(error).__name__})"
        if reason or (not calls and call_prefix and call_prefix in answer):
            reason = _find_json_error(answer.partition(call_prefix)[2]) or reason
            example = renderer.render_call(*renderer.example_call).strip()
            raise ToolCallParseError(f"this tool call cannot be parsed{reason}. Write a call like {example}")
        if len(calls) > 1 and not supports_parallel:
            raise ToolCallParseError("the turn has several tool calls. Make one call per turn.")
        return calls

    return parse_calls


def _find_json_error(text: str) -> str:
    """Return what is wrong with the first JSON object in the text of calls; empty if there is none or it is valid."""
    start = text.find("{")
    try:
        json.JSONDecoder().raw_decode(text[max(start, 0) :])
    except (ValueError, RecursionError) as error:
        return f": {error}" if start >= 0 else ""
    return ""


def _describe_mismatch(parse_calls: ToolCallParser, renderer: ToolRenderer) -> str:
    """Render an example tool call and parse it. Returns how the parsed call differs, or "" if it is the same."""
    name, arguments = renderer.example_call
    written = renderer.render_call(name, arguments)
    try:
        calls = parse_calls(written)
        is_same = [(call.name, json.loads(call.arguments)) for call in calls] == [(name, arguments)]
    except ValueError as error:
        return f"{written!r} ({str(error).partition('. ')[0]})"
    return "" if is_same else f"{written!r} became {calls or 'no call'}"


def _make_tokenizer_parser(renderer: ToolRenderer) -> Parse:
    if getattr(renderer.tokenizer, "response_template", None) is None:
        raise ValueError(
            "env.action_format=chat_template: the tokenizer has no response_template. Set env.tool_parser "
            f"to a vLLM parser. {_suggest_parsers(renderer)}"
        )
    # The generation prompt may contain the beginning of the answer.
    prefix, _ = split_open_mark(renderer.render_chat([QUESTION]))

    def parse(text: str) -> list[ToolCall]:
        message = renderer.tokenizer.parse_response(text, prefix=prefix, tools=renderer.schemas)
        return [_make_tool_call(call["function"], message.get("content")) for call in message.get("tool_calls", [])]

    return parse


def _make_tool_call(function: JsonObject, content: str | None) -> ToolCall:
    """Build a tool call from the `function` field of a chat message's tool call, and the message's content."""
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str):
        raise TypeError(f"the tool name must be a string, not {name!r}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, text, content or "")


def _make_vllm_parser(parser_name: str, renderer: ToolRenderer) -> Parse:
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"env.tool_parser={parser_name} needs vLLM, which is not installed. Run scripts/setup.sh, or remove "
            "env.tool_parser and use a tokenizer whose response_template parses tool calls."
        )
    from alphaapollo.engines.vllm.settings import make_vllm_tool_parser

    return make_vllm_tool_parser(parser_name, renderer)


def _suggest_parsers(renderer: ToolRenderer) -> str:
    """Return a sentence that lists the vLLM parsers that can parse the calls that the chat template renders."""
    if importlib.util.find_spec("vllm") is None:
        return "Parsers need vLLM, which is not installed. Run scripts/setup.sh."
    from alphaapollo.engines.vllm.settings import list_tool_parsers

    fitting = []
    for name in list_tool_parsers():
        with contextlib.suppress(ValueError):
            if not _describe_mismatch(_make_strict_parser(_make_vllm_parser(name, renderer), renderer), renderer):
                fitting.append(name)
    if not fitting:
        return "No vLLM parser works. Set env.action_format=tags."
    return f"These parsers work: {', '.join(f'env.tool_parser={name}' for name in fitting)}."
