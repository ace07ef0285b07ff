"""env.action_format=chat_template: which parser reads a model's own tool calls, and the proof that it reads what the
chat template writes. (tags: environments/read_tags.py)"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.data.rendering import load_tokenizer
from alphaapollo.data.tool_rendering import QUESTION, ToolRenderer
from alphaapollo.tools.written_calls import Call, ReadCalls, UnreadableCallError, without_thoughts
from alphaapollo.utils.user_module import load_user_module

Parse = Callable[[str], list[Call]]
"""A parser as its library has it: for a text that it cannot read it may raise anything, or find no call."""


def make_call_reader(parser: str, renderer: ToolRenderer) -> ReadCalls:
    """The reader of env.tool_parser: vLLM's of that name, or that of the tokenizer's own response_template.

    ValueError: there is no such parser, it needs tokens that the tokenizer does not have, or it does not read what the
    chat template writes; names those that do.
    """
    read_calls = _guarded(_of_vllm(parser, renderer) if parser else _of_tokenizer(renderer), renderer)
    if problem := _disagreement(read_calls, renderer):
        what = f"env.tool_parser={parser}" if parser else "the tokenizer's response_template"
        raise ValueError(f"{what} does not read what the chat template writes: {problem}. {_choices(renderer)}")
    return read_calls


def check_call_reader(
    env: Env,
    tokenizer_path: str,
    trust_remote_code: bool,
    schemas: Sequence[dict[str, Any]],
    template_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """make_call_reader's ValueErrors, from a process of its own: importing vLLM takes memory and fixes its settings."""
    arguments = (env, tokenizer_path, trust_remote_code, list(schemas), dict(template_arguments))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_try_to_make, *arguments).result()


def _try_to_make(
    env: Env,
    tokenizer_path: str,
    trust_remote_code: bool,
    schemas: list[dict[str, Any]],
    template_arguments: dict[str, Any],
) -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if env.custom_module:  # it may register a parser
        load_user_module(env.custom_module, "env.custom_module")
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    make_call_reader(env.tool_parser, ToolRenderer(tokenizer, schemas, template_arguments))


def _guarded(parse: Parse, renderer: ToolRenderer) -> ReadCalls:
    """Whatever a model writes gives calls or an UnreadableCallError."""
    mark, several = renderer.call_mark, renderer.shows_several_calls

    def read_calls(text: str) -> list[Call]:
        try:
            calls = parse(text)
        except Exception as error:  # parsers may raise anything for what a model writes
            raise UnreadableCallError(f"this tool call cannot be read ({type(error).__name__}).") from error
        if not calls and mark and mark in without_thoughts(text):
            raise UnreadableCallError("this tool call cannot be read.")
        if len(calls) > 1 and not several:
            raise UnreadableCallError("several tool calls at once; make one a turn.")
        return calls

    return read_calls


def _disagreement(read_calls: ReadCalls, renderer: ToolRenderer) -> str:
    """What is wrong where an example goes through template and parser; empty if it comes back as it was."""
    name, arguments = renderer.example
    written = renderer.written(name, arguments)
    try:
        calls = read_calls(written)
        same = [(call.name, json.loads(call.arguments)) for call in calls] == [(name, arguments)]
    except ValueError as error:
        return f"{written!r} ({error})"
    return "" if same else f"{written!r} became {calls or 'no call'}"


def _of_tokenizer(renderer: ToolRenderer) -> Parse:
    if getattr(renderer.tokenizer, "response_template", None) is None:
        raise ValueError(
            "env.action_format=chat_template: the tokenizer has no response_template to read tool calls with, so "
            f"env.tool_parser must name a parser of vLLM's. {_choices(renderer)}"
        )
    prefix = renderer.text([QUESTION])  # a template may begin the answer itself

    def parse(text: str) -> list[Call]:
        message = renderer.tokenizer.parse_response(text, prefix=prefix, tools=renderer.schemas)
        return [_call(call["function"]) for call in message.get("tool_calls", [])]

    return parse


def _call(function: dict[str, Any]) -> Call:
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str):
        raise TypeError("its name is no text")
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _of_vllm(name: str, renderer: ToolRenderer) -> Parse:
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"env.tool_parser={name}: its parsers come with vLLM, which is not installed. Run scripts/setup.sh, "
            "or take a tokenizer with a response_template."
        )
    from alphaapollo.engines.vllm.tool_parser import vllm_parse

    return vllm_parse(name, renderer)


def _choices(renderer: ToolRenderer) -> str:
    """Which of vLLM's parsers would do: each is tried."""
    if importlib.util.find_spec("vllm") is None:
        return "They come with vLLM, which is not installed: run scripts/setup.sh."
    from alphaapollo.engines.vllm.tool_parser import parser_names

    fitting = [name for name in parser_names() if _fits(name, renderer)]
    if not fitting:
        return "No parser of vLLM's does either: set env.action_format=tags."
    return f"Those that read this template: {', '.join(f'env.tool_parser={name}' for name in fitting)}."


def _fits(name: str, renderer: ToolRenderer) -> bool:
    try:
        return not _disagreement(_guarded(_of_vllm(name, renderer), renderer), renderer)
    except ValueError:
        return False
