"""The guessing game as a class for TRL's `environment_factory`, which imports nothing of this project."""

from __future__ import annotations

from random import Random


class GuessingGame:
    def __init__(self, numbers: int = 31):
        self.numbers = numbers

    def reset(self, seed: int, **columns: object) -> str:
        self.target, self.found = Random(seed).randint(1, self.numbers), False
        return f"1-{self.numbers}"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        self.found |= number == self.target
        return "found" if number == self.target else "higher" if number < self.target else "lower"

    def get_reward(self) -> float:
        return float(self.found)
