"""The guessing game as a Gymnasium environment, which imports nothing of this project."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces


class GuessingGame(gymnasium.Env):
    def __init__(self, numbers: int = 31, guesses: int = 5):
        self.numbers, self.guesses = numbers, guesses
        self.action_space = spaces.Discrete(numbers, start=1)
        self.observation_space = spaces.Text(10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.target, self.left = int(self.np_random.integers(1, self.numbers, endpoint=True)), self.guesses
        return f"1-{self.numbers}", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        found = bool(action == self.target)
        reply = "found" if found else "higher" if action < self.target else "lower"
        return reply, float(found), found, self.left == 0, {"is_success": found}
