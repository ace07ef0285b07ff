"""Render an episode's first prompt (with env.context=memory, each prompt) within data.max_prompt_length tokens."""

from __future__ import annotations

from collections.abc import Callable

from alphaapollo.data.images import collect_images
from alphaapollo.data.prompts import Truncation, truncate_prompt
from alphaapollo.environments.base import EnvironmentFailure, wrap_environment_errors
from alphaapollo.types import EncodedImage, Message

CACHE_SIZE = 256  # rendered prompts


class PromptTooLong(EnvironmentFailure):
    """Error: a prompt is longer than data.max_prompt_length, and may not be truncated."""


class PromptRenderer:
    """Callable that renders messages or text to prompt tokens, and truncates or rejects more than `max_tokens`.

    The last CACHE_SIZE prompts are cached, because chat templates are slow and the episodes of a group start with the
    same prompt. Prompts of datasets are checked before training. A prompt that is too long therefore comes from an
    environment, and fails the episode, not the run. Prompts with images are never truncated.
    """

    def __init__(self, render: Callable[[list[Message] | str], list[int]], max_tokens: int, truncation: Truncation):
        self._render, self._max_tokens, self._truncation = render, max_tokens, truncation
        self._rendered: dict[tuple[str, tuple[EncodedImage, ...]], list[int]] = {}

    def __call__(self, content: list[Message] | str) -> list[int]:
        """Return the prompt's tokens as a new list. Raises PromptTooLong, or EnvironmentFailure if the chat template or
        the tokenizer raises an error."""
        token_ids = self._render_cached(content)
        has_images = bool(collect_images(content))
        if len(token_ids) <= self._max_tokens or (self._truncation in ("left", "right") and not has_images):
            return list(truncate_prompt(token_ids, self._max_tokens, self._truncation))
        fix = "use smaller images" if has_images else "set data.truncation to left or right"
        raise PromptTooLong(
            f"the observation has {len(token_ids)} tokens, more than data.max_prompt_length={self._max_tokens}. "
            f"Increase data.max_prompt_length, or {fix}."
        )

    def is_within_limit(self, content: list[Message] | str) -> bool:
        return len(self._render_cached(content)) <= self._max_tokens

    def _render_cached(self, content: list[Message] | str) -> list[int]:
        key = _make_cache_key(content)
        token_ids = self._rendered.get(key)
        if token_ids is None:
            with wrap_environment_errors("rendering the observation"):
                token_ids = self._rendered[key] = self._render(content)
            if len(self._rendered) > CACHE_SIZE:
                del self._rendered[next(iter(self._rendered))]  # the oldest
        return token_ids


def _make_cache_key(content: list[Message] | str) -> tuple[str, tuple[EncodedImage, ...]]:
    """Return a hashable key of a prompt. It is fast for large images, because Python keeps the hash of bytes."""
    if isinstance(content, str):
        return repr(content), ()
    texts = [{**message, "images": len(message.get("images", ()))} for message in content]
    return repr(texts), tuple(collect_images(content))
