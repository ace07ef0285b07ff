"""Interface between an engine's HTTP API (engines/vllm/http_api.py) and the sessions of agents (rollout/agents/)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from alphaapollo.types import Completion, EncodedImage, ImageInput, JsonObject, Sampling

ChatMessages = Sequence[JsonObject]
"""Messages in the form that the chat template receives: role, content, tool_calls, ..."""


ParseAnswer = Callable[[str, list[int]], tuple[str, list[tuple[str, str]]]]
"""(text, token ids) -> content and tool calls, as the client receives them."""


MODEL_NAME = "policy"  # name of the policy in requests


@dataclass(frozen=True)
class HttpApiSettings:
    """Settings of an HTTP API."""

    tool_parser: str = ""  # vLLM's parser of tool calls; empty: answers have no tool calls
    reasoning_parser: str = ""  # vLLM's parser of reasoning; empty: reasoning is part of the text
    template_arguments: Mapping[str, object] = field(default_factory=dict)  # data.apply_chat_template_kwargs
    allow_image_urls: bool = False  # data.allow_image_urls


@dataclass(frozen=True)
class History:
    """Beginning of a chat whose exact tokens are known, because the engine received and sampled them."""

    token_ids: list[int]  # last prompt and its sampled answer
    answer_start: int  # index of the first message of the sampled answer
    answer_end: int  # index after the last message of the sampled answer


@dataclass(frozen=True)
class SampledAnswer:
    """One answer to a request: its tokens, and what the client receives of them."""

    completion: Completion
    text: str  # decoded tokens
    content: str  # text of the message, without reasoning and tool calls
    tool_calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments as JSON)


@dataclass(frozen=True)
class RequestedSampling:
    """What a request asks of the sampler, as far as the policy's sampling settings permit it."""

    max_tokens: int
    is_constrained: bool  # tokens were excluded from sampling, e.g. by a JSON schema


class HttpRequest(Protocol):
    """A request of an agent. The engine's HTTP API sets the attributes and calls the methods in this order."""

    parse_answer: ParseAnswer | None
    images: tuple[ImageInput, ...]  # images of the chat, in order

    @property
    def encoded_images(self) -> dict[str, EncodedImage]:
        """Images of the session's chats as the client sent them, by digest, for the rollout log."""
        ...

    def find_history(self, messages: ChatMessages, template_variables: str) -> History | None:
        """Return the longest beginning of the chat whose tokens are known; None if there is none.

        template_variables: everything else that the rendered chat depends on, e.g. tools.
        """
        ...

    def discard_history(self) -> None:
        """Use a newly rendered prompt, because the chat cannot be rendered after the known tokens."""
        ...

    def check_prompt(self, token_ids: list[int]) -> None:
        """Check the rendered prompt. Raises ValueError if it leaves no token for an answer."""
        ...

    def start_sampling(self, request_id: str, prompt_ids: list[int], wanted: RequestedSampling) -> Sampling:
        """Return the policy's sampling settings for the answers to this request."""
        ...

    def get_sampled_outputs(self) -> Any | None:
        """Return the `outputs` of an earlier, identical request whose answer the client did not receive; else None."""
        ...

    def record_answers(self, answers: list[SampledAnswer], outputs: object) -> None:
        """Record the answers before the client receives them. `outputs`: what the engine returned."""
        ...

    def record_engine_error(self, error: Exception) -> None:
        """Record that the engine failed, which is not a failure of the agent."""
        ...


CURRENT_REQUEST: ContextVar[HttpRequest | None] = ContextVar("current_request", default=None)
"""The request that the current asyncio task serves."""
