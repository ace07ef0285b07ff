"""Render chats with tool calls in the format of the chat template (env.action_format=chat_template).

    encode_prompt(chat) -> sampled calls -> encode_observation(one message of role "tool" per call) -> ...

A chat template only renders tool results after their calls. Results are therefore rendered in a chat with placeholder
calls, and the text before the end of the assistant turn is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from alphaapollo.data.chats import count_equal_items
from alphaapollo.data.images import ImageProcessor
from alphaapollo.data.rendering import PLACEHOLDER, Renderer
from alphaapollo.types import ChatMessage, JsonObject, Message
from alphaapollo.utils.thoughts import split_thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESULT_PLACEHOLDER = "\u2063result\u2063"  # replaces a tool result in a chat that is rendered
UNSUPPORTED_TEMPLATE = (
    "env.action_format=chat_template: the chat template does not show the assistant's calls, the end of the turn and "
    "then the messages of the role tool. Use a model whose template shows them, or set env.action_format=tags."
)
QUESTION = Message(role="user", content="?")
EXAMPLE_VALUES: dict[object, str | float] = {"string": "x", "integer": 1, "number": 1.5, "boolean": True}


def describe_function(function: Callable[..., object]) -> JsonObject:
    """Return what a model sees of a function, {name, description, parameters, return}, from its types and docstring.
    Raises ValueError if the docstring or a type is missing."""
    from transformers.utils import chat_template_utils as schemas

    try:
        return {**schemas.get_json_schema(function)["function"]}
    except (schemas.DocstringParsingException, schemas.TypeHintParsingException) as error:
        raise ValueError(
            f"the tool {function.__name__}: {error}. Give it a docstring, and each argument a type and a line under "
            "`Args:`."
        ) from error


class ToolRenderer(Renderer):
    """Tokenizer and chat template of a model, with the definitions of the tools that the model may call: at least one
    of `{"type": "function", "function": {name, description, parameters}}`."""

    skips_special_tokens = False  # tool calls may contain them

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[JsonObject],
        template_arguments: Mapping[str, object] = MappingProxyType({}),
        images: ImageProcessor | None = None,
        model_path: str = "",
    ):
        self.schemas = list(schemas)
        super().__init__(tokenizer, {**template_arguments, "tools": self.schemas}, images, model_path)

    def with_arguments(self, arguments: Mapping[str, object]) -> Self:
        """Return a copy with more variables for the chat template. Raises ValueError for the tools of a data row, which
        the environment does not run."""
        if "tools" in arguments:
            raise ValueError(
                "the row has a column 'tools', but env.action_format=chat_template shows the tools of env.tools. "
                "Remove the column, or set env.action_format=tags."
            )
        return super().with_arguments(arguments)

    def check_template_shows_tools(self, in_append_context: bool) -> None:
        """Raise ValueError if the chat template does not render the tools and their results, appended to the sampled
        tokens (in_append_context) or in a new prompt."""
        shown = self.render_chat([QUESTION])
        names = [schema["function"]["name"] for schema in self.schemas]
        if missing := [name for name in names if name not in shown]:
            raise ValueError(
                f"env.action_format=chat_template: the chat template does not show the tools {', '.join(missing)}. "
                "Use a model whose template shows them, or set env.action_format=tags."
            )
        result = Message(role="tool", content=RESULT_PLACEHOLDER, name=self.first_tool)
        if in_append_context:
            shown = self.decode_raw(self.encode_observation([result]))
        else:
            shown = self.render_chat([QUESTION, Message(role="assistant", content="!"), result])
        if RESULT_PLACEHOLDER not in shown:
            raise ValueError(UNSUPPORTED_TEMPLATE)

    @property
    def first_tool(self) -> str:
        """Name of the first tool, with which the chat template is tried."""
        return str(self.schemas[0]["function"]["name"])

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the chat template changes an earlier answer that is followed by a tool result."""
        content = "{0}\n{2}\n{1}\n\n{2}".format(*self.marks.pair, PLACEHOLDER)  # a thought, then an answer
        call = _make_call_message([self.first_tool], {}) | {"content": content}
        result = Message(role="tool", content="?", name=self.first_tool)
        shown = self.render_chat([QUESTION, call, _add_call_id(result, 0)])
        return not shown.startswith(self.render_chat([QUESTION]) + content)

    @cached_property
    def supports_parallel_calls(self) -> bool:
        """Whether the chat template can render several tool calls in one assistant turn."""
        try:
            self.encode_observation([Message(role="tool", content="?", name=self.first_tool)] * 2)
        except ValueError:
            return False
        return True

    @cached_property
    def call_prefix(self) -> str:
        """Text that every tool call starts with, e.g. `<tool_call>`. Empty if it is too short to identify calls."""
        before = split_thoughts(self.render_call(PLACEHOLDER, {}).partition(PLACEHOLDER)[0])[1].strip()
        first = self.encode([before])[0][:1]
        if first and first[0] in self.tokenizer.added_tokens_decoder:
            return str(self.tokenizer.decode(first)).strip()
        word = before.split()[0] if before else ""
        return word if len(word) > 3 else ""

    @cached_property
    def example_call(self) -> tuple[str, JsonObject]:
        """Name and arguments of an example call of the first tool, to show the call format in a message."""
        properties = self.schemas[0]["function"]["parameters"].get("properties", {})
        types = {name: schema.get("type") for name, schema in properties.items()}
        arguments = {name: EXAMPLE_VALUES[kind] for name, kind in types.items() if str(kind) in EXAMPLE_VALUES}
        return self.first_tool, arguments

    def render_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return the text that the model must sample to call the tool `name`."""
        text = self.render_chat([QUESTION, _make_call_message([name], arguments)], add_generation_prompt=False)
        start = count_equal_items(text, self.render_chat([QUESTION]))
        ids = self.encode([text[start:]])[0]
        action = list(takewhile(lambda token: token not in self.eos_token_ids, ids))
        return self.decode_raw(action)

    def _encode_following_messages(self, messages: list[Message], add_generation_prompt: bool) -> list[int]:
        results = list(takewhile(lambda message: message["role"] == "tool", messages))
        if not results:
            return super()._encode_following_messages(messages, add_generation_prompt)
        names = [result.get("name", "") for result in results]
        results_with_ids = [_add_call_id(result, index) for index, result in enumerate(results)]
        call = _make_call_message(names, {"_": PLACEHOLDER})
        chat: list[ChatMessage] = [QUESTION, call, *results_with_ids, *messages[len(results) :]]
        _, found, rest = self.render_chat(chat, add_generation_prompt).partition(PLACEHOLDER)
        ids = self.find_turn_end(self.encode([rest])[0])
        if not found or not ids:
            raise ValueError(UNSUPPORTED_TEMPLATE)
        return ids


def _make_call_message(tool_names: Sequence[str], last_arguments: Mapping[str, object]) -> JsonObject:
    """Create an assistant message with one call per tool. Only the last call has arguments: `last_arguments`."""
    arguments: list[Mapping[str, object]] = [*({} for _ in tool_names[1:]), last_arguments]
    calls = [
        {"id": _format_call_id(index), "type": "function", "function": {"name": name, "arguments": dict(values)}}
        for index, (name, values) in enumerate(zip(tool_names, arguments, strict=True))
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _add_call_id(tool_result: Message, call_index: int) -> JsonObject:
    return {**tool_result, "tool_call_id": _format_call_id(call_index)}


def _format_call_id(call_index: int) -> str:
    return f"call{call_index:05}"  # nine letters and digits, as some templates require
