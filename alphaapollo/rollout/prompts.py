"""Render prompts within data.max_prompt_length: the first of each episode, and every prompt in memory context."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from alphaapollo.data.length_limit import Truncation, truncate_prompt
from alphaapollo.environments.base import EnvironmentFailure, wrap_environment_errors
from alphaapollo.types import Message

CACHE_SIZE = 256  # rendered prompts


class PromptTooLong(EnvironmentFailure):
    """Error: an observation is longer than data.max_prompt_length, and data.truncation is not left or right."""


class PromptRenderer:
    """Renderer of observations to at most `max_tokens` prompt tokens.

    Chat templates are slow, and the samples of a group start with the same observation. The last CACHE_SIZE rendered
    prompts are therefore cached. Dataset prompts are checked before training (data.length_limit.apply_length_limit).
    A longer prompt comes from an environment: it fails its episode, not the run.
    """

    def __init__(self, render: Callable[[list[Message] | str], list[int]], max_tokens: int, truncation: Truncation):
        self._render, self._max_tokens, self._truncation = render, max_tokens, truncation
        self._rendered: OrderedDict[str, list[int]] = OrderedDict()

    def __call__(self, content: list[Message] | str) -> list[int]:
        """Return the prompt's tokens as a new list.

        Raises:
            PromptTooLong: the prompt is too long and truncation is neither left nor right.
            EnvironmentFailure: the chat template or the tokenizer raised an error.
        """
        token_ids = self._render_cached(content)
        if len(token_ids) <= self._max_tokens or self._truncation in ("left", "right"):
            return list(truncate_prompt(token_ids, self._max_tokens, self._truncation))
        raise PromptTooLong(
            f"the observation has {len(token_ids)} tokens, more than data.max_prompt_length={self._max_tokens}. "
            "Increase it, or set data.truncation to left or right."
        )

    def is_within_limit(self, content: list[Message] | str) -> bool:
        return len(self._render_cached(content)) <= self._max_tokens

    def _render_cached(self, content: list[Message] | str) -> list[int]:
        key = repr(content)
        token_ids = self._rendered.get(key)
        if token_ids is None:
            with wrap_environment_errors("rendering the observation"):
                token_ids = self._rendered[key] = self._render(content)
            if len(self._rendered) > CACHE_SIZE:
                self._rendered.popitem(last=False)
        return token_ids
