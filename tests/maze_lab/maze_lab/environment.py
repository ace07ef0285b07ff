import random

from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.types import Prompt


@register_environment("maze", graded=True, tools=None)
class Maze:
    """Walk to the end of a corridor: each `>` is a move."""

    def __init__(self, services: Services):
        self.score, self.settings = services.score, services.settings  # env.plugins.maze
        self.path, self.turn, self.doors = "", 0, random.Random(self.settings.doors_seed)

    def reset(self, prompt: Prompt) -> Observation:
        self.prompt = prompt
        return Observation([{"role": "user", "content": f"Walk {self.settings.size} cells."}])

    async def step(self, action: str) -> StepResult:
        self.turn += 1
        if self.settings.doors == "open" or self.doors.random() < 0.5:
            self.path += ">" * action.count(">")
        if len(self.path) >= self.settings.size or self.turn == self.settings.turns:
            return StepResult(done=True, score=await self.score(self.prompt, self.path))
        return StepResult(Observation([{"role": "user", "content": f"You are in cell {len(self.path)}."}]))

    def close(self) -> None:
        pass
