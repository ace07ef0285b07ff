"""First observations to tokens, within data.max_prompt_length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from alphaapollo.data.rendering import Truncation, cut_prompt
from alphaapollo.environments.base import EnvironmentFailure
from alphaapollo.types import Message


class PromptRenderer:
    """Renders a first observation, cut to at most `max_tokens` as `truncation` says.

    The n samples of a prompt mostly begin alike, so the last `memory` renderings are kept: chat templates are slow.
    The data's own prompts were held against the limit before training (data.rendering.fit_prompts); what is still
    over it here was made longer by an environment.
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
            ValueError: too long, and truncation is `error`: the run stops.
            EnvironmentFailure: too long, and truncation is `drop`: the episode is masked and counted.
        """
        key = repr(content)
        token_ids = self._rendered.get(key)
        if token_ids is None:
            token_ids = self._rendered[key] = self._fit(self._render(content))
            if len(self._rendered) > self._memory:
                self._rendered.popitem(last=False)
        return list(token_ids)

    def fits(self, content: list[Message] | str) -> bool:
        return len(self._render(content)) <= self._max_tokens

    def _fit(self, token_ids: list[int]) -> list[int]:
        if len(token_ids) <= self._max_tokens or self._truncation in ("left", "right"):
            return cut_prompt(token_ids, self._max_tokens, self._truncation)
        message = (
            f"an episode begins with {len(token_ids)} tokens, data.max_prompt_length is {self._max_tokens}. "
            "Raise it, or set data.truncation to left or right (cut) or drop (mask the episode)."
        )
        raise EnvironmentFailure(message) if self._truncation == "drop" else ValueError(message)
