"""env.custom_module=examples/reference/environment.py env.env_name=higher_or_lower env.max_steps=8"""

from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.types import Prompt, Score


@register_environment("higher_or_lower")
class HigherOrLower:
    """Guess the number of the data row, from 1 to 100, with one hint per guess."""

    def __init__(self, services: Services):
        self.secret = 0

    def reset(self, prompt: Prompt) -> Observation:
        self.secret = int(prompt.ground_truth or 50)
        return Observation([{"role": "user", "content": "Guess my number from 1 to 100."}])

    def step(self, action: str) -> StepResult:
        if not action.strip().isdigit():
            return StepResult(Observation([{"role": "user", "content": "Answer with a number."}]), valid=False)
        guess = int(action)
        if guess == self.secret:
            return StepResult(done=True, score=Score(1.0, {"accuracy": 1.0}))
        hint = "Higher." if guess < self.secret else "Lower."
        return StepResult(Observation([{"role": "user", "content": hint}]), reward=-0.1)

    def close(self) -> None:
        pass
