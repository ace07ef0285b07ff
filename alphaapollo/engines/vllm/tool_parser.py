"""vLLM's parsers of tool calls, without an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.tools.written_calls import Call, without_thoughts
from alphaapollo.utils.registry import nearest


def parser_names() -> list[str]:
    """As `vllm serve --tool-call-parser` takes them, and those that a module of the user's has registered."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager.list_registered()


def vllm_parse(name: str, renderer: ToolRenderer) -> Callable[[str], list[Call]]:
    """What the parser finds after the thoughts of a text. Safe to call from several threads.

    ValueError: there is no such parser, or it does not work with the renderer's tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

    if name not in parser_names():
        near = nearest(name, parser_names())
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"env.tool_parser={name}: vLLM has no such parser.{hint} Known: {', '.join(parser_names())}.")
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # they log a traceback for what a model miswrites
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=renderer.schemas)
    cached = get_cached_tokenizer(renderer.tokenizer)  # they ask for its whole vocabulary, each time
    try:
        make = ToolParserManager.get_tool_parser(name)
        make(cached, request.tools)
    except Exception as error:  # each refuses a tokenizer without its tokens in its own way
        raise ValueError(f"env.tool_parser={name}: it does not work with this tokenizer: {error}") from error

    def parse(text: str) -> list[Call]:
        found = make(cached, request.tools).extract_tool_calls(without_thoughts(text), request)
        return [Call(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse
