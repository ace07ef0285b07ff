"""Environment with one turn: one prompt, one answer, one reward function."""

from __future__ import annotations

from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.types import Prompt


@register_environment("single_turn", graded=True, tools=None)
class SingleTurnEnvironment:
    """Environment that shows the prompt unchanged and scores the first answer."""

    def __init__(self, services: Services):
        self._score = services.score
        self._prompt: Prompt | None = None

    async def reset(self, prompt: Prompt) -> Observation | str:
        self._prompt = prompt
        return prompt.content if isinstance(prompt.content, str) else Observation(prompt.content)

    async def step(self, action: str) -> StepResult:
        assert self._prompt is not None, "step before reset"
        return StepResult(done=True, score=await self._score(self._prompt, action))

    async def close(self) -> None: ...
