"""A model that an engine of ours serves: of this run, or a training run's own (any rollout.engine.Engine that lives on
this event loop)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alphaapollo.data.rendering import Renderer, Truncation
from alphaapollo.engines.protocol import Engine
from alphaapollo.environments.base import EnvironmentFailure
from alphaapollo.evolving.client import CallFailed, Reply
from alphaapollo.rollout.prompts import PromptRenderer
from alphaapollo.types import Message, Sampling


class EngineClient:
    """Renders messages by the model's chat template, `max_prompt_length` tokens at most."""

    limit: float | None = None

    def __init__(self, engine: Engine, renderer: Renderer, max_prompt_length: int, truncation: Truncation):
        self.engine, self._renderer = engine, renderer
        self._prompts = PromptRenderer(renderer.prompt_ids, max_prompt_length, truncation)

    async def start(self) -> None:
        await self.engine.start()

    async def generate(self, messages: Sequence[Message], sampling: Sampling, name: str) -> Reply:
        try:
            token_ids = self._prompts(list(messages))
        except EnvironmentFailure as failure:
            raise CallFailed(str(failure)) from failure
        sampling = replace(sampling, stop_token_ids=self._renderer.eos_token_ids)
        completion = await self.engine.generate(token_ids, sampling, name)
        text = self._renderer.decode(completion.token_ids)
        return Reply(text, len(token_ids), len(completion.token_ids), completion.stop_reason.value)

    def fits(self, messages: Sequence[Message]) -> bool:
        return self._prompts.fits(list(messages))

    async def close(self) -> None:
        await self.engine.close()
