"""First observations, and in memory context all of them, to tokens within data.max_prompt_length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from alphaapollo.data.rendering import Truncation, cut_prompt
from alphaapollo.environments.base import EnvironmentFailure, blaming
from alphaapollo.types import Message


class PromptTooLong(EnvironmentFailure):
    """The environment asks more than a prompt may hold, and prompts are not cut."""


class PromptRenderer:
    """Renders a first observation, cut to at most `max_tokens` where `truncation` says so.

    The n samples of a prompt mostly begin alike, so the last `memory` renderings are kept: chat templates are slow.
    The data's own prompts were held against the limit before training (data.rendering.fit_prompts); what is still
    over it here was made longer by an environment: that costs its episode, never the run.
    """

    def __init__(
        self,
        render: Callable[[list[Message] | str], list[int]],
        max_tokens: int,
        truncation: Truncation,
        memory: int = 256,
    ):
        self._render = render
        self._max_tokens = max_tokens
        self._truncation = truncation
        self._memory = memory
        self._rendered: OrderedDict[str, list[int]] = OrderedDict()

    def __call__(self, content: list[Message] | str) -> list[int]:
        """The tokens, a list of its own.

        Raises:
            PromptTooLong: too long, and truncation is neither left nor right.
            EnvironmentFailure: the chat template or the tokenizer refuses it.
        """
        token_ids = self._tokens(content)
        if len(token_ids) <= self._max_tokens or self._truncation in ("left", "right"):
            return list(cut_prompt(token_ids, self._max_tokens, self._truncation))
        raise PromptTooLong(
            f"the environment asks {len(token_ids)} tokens, data.max_prompt_length is {self._max_tokens}. "
            "Raise it, or set data.truncation to left or right (cut)."
        )

    def fits(self, content: list[Message] | str) -> bool:
        return len(self._tokens(content)) <= self._max_tokens

    def _tokens(self, content: list[Message] | str) -> list[int]:
        key = repr(content)
        token_ids = self._rendered.get(key)
        if token_ids is None:
            with blaming("rendering its observation"):
                token_ids = self._rendered[key] = self._render(content)
            if len(self._rendered) > self._memory:
                self._rendered.popitem(last=False)
        return token_ids
