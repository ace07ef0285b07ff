"""vLLM's tool-call parsers, usable without an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.tools.base import ToolCall, strip_thinking


def list_tool_parsers() -> list[str]:
    """Return the names of the tool-call parsers of vLLM (`vllm serve --tool-call-parser`) and of the user module."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager.list_registered()


def make_vllm_tool_parser(name: str, renderer: ToolRenderer) -> Callable[[str], list[ToolCall]]:
    """Build a thread-safe function that extracts the tool calls from the text of a completion, after its thinking part.

    Raises ValueError if vLLM has no parser `name`, or if the parser does not work with the renderer's tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # parsers log tracebacks of malformed calls
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=renderer.schemas)
    cached = get_cached_tokenizer(renderer.tokenizer)  # parsers read the whole vocabulary at each call
    try:
        parser_class = ToolParserManager.get_tool_parser(name)
        parser_class(cached, request.tools)
    except Exception as error:  # an unknown name, or tokens that the parser needs are missing
        raise ValueError(f"env.tool_parser={name} is not usable with this model: {error}") from error

    def parse_tool_calls(text: str) -> list[ToolCall]:
        found = parser_class(cached, request.tools).extract_tool_calls(strip_thinking(text), request)
        return [ToolCall(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse_tool_calls
