"""Game of two images: the model names the colour of one, and the environment answers with the next one."""

from __future__ import annotations

from random import Random

from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.types import Prompt, Score
from examples.colours.task import ask


@register_environment("two_images", tools=None)
class TwoImages:
    """Environment that shows a second image after a right answer. A wrong answer ends the game with score 0.

    `env_kwargs.colours`: the right answers of both turns.
    """

    def __init__(self, services: Services): ...

    def reset(self, prompt: Prompt) -> Observation:
        assert not isinstance(prompt.content, str)
        self._id, self._colours = prompt.id, list(prompt.env_kwargs["colours"])
        return Observation(prompt.content)

    def step(self, action: str) -> StepResult:
        right = action.strip() == self._colours.pop(0)
        if not right or not self._colours:
            return StepResult(done=True, score=Score(float(right)))
        return StepResult(Observation([ask(self._colours[0], Random(self._id))]))  # the same image in all samples

    def close(self) -> None: ...
