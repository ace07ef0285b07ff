"""Number guessing game: after each guess, the environment says whether the number is higher or lower.

Placeholders of env.prompt: {numbers} and {steps}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from pydantic import PositiveInt

from alphaapollo.config.schema.base import Section
from alphaapollo.environments.action_parser import read_action
from alphaapollo.environments.base import register_environment
from alphaapollo.environments.memory import Step
from alphaapollo.environments.text_game import MoveResult, TextGame
from alphaapollo.types import Message
from alphaapollo.utils.text import fill_template

PROMPT = (
    "I have chosen a whole number from 1 to {numbers}. Find it with at most {steps} guesses. After each guess I say "
    "whether the number is higher or lower. Guess with <answer>number</answer>."
)
HIGHER, LOWER = "higher", "lower"


class GuessingGameSettings(Section):
    numbers: PositiveInt = 100
    """Upper bound of the number to guess; the lower bound is 1."""


@register_environment("guessing_game", tools=None, settings=GuessingGameSettings)
class GuessingGameEnvironment(TextGame):
    """Guessing game for a number. Binary search finds one of 2**n - 1 numbers in n guesses."""

    def begin(self, rng: Random) -> None:
        self._low, self._high = 1, self.settings.numbers  # range that agrees with all answers
        self.target = rng.randint(self._low, self._high)

    def prompt(self) -> str:
        return fill_template(self.config.prompt or PROMPT, numbers=self.settings.numbers, steps=self.config.max_steps)

    def play(self, action: str) -> MoveResult:
        numbers = set(re.findall(r"-?[0-9]+", action))
        if len(numbers) != 1:
            return MoveResult(f"invalid action: {len(numbers) or 'no'} numbers; guess one", valid=False)
        digits = numbers.pop()
        guess = int(digits[:18])  # longer numbers are out of range, and int() limits the number of digits
        if guess == self.target:
            return MoveResult("found", won=True)
        if guess < self.target:
            self._low = max(self._low, guess + 1)
            return MoveResult(HIGHER)
        self._high = min(self._high, guess - 1)
        return MoveResult(LOWER)

    def state(self) -> str:
        return f"{self._low}-{self._high}"

    def recall(self, steps: Sequence[Step]) -> list[Message]:
        """Return the prompt of a later turn: the instructions and one line per past guess, e.g. `16: higher`."""
        lines = [self.prompt()]
        for step in steps:
            found = read_action(step.action, allow_bare_word=True)
            lines.append(f"{'?' if found.error else found.content}: {step.observation[-1]['content']}")
        return [Message(role="user", content="\n".join(lines))]


@register_environment("deaf_guessing_game", tools=None, settings=GuessingGameSettings)
class DeafGuessingGame(GuessingGameEnvironment):
    """Guessing game that always answers `higher`: the baseline of a player without information."""

    def play(self, action: str) -> MoveResult:
        move = super().play(action)
        return MoveResult(HIGHER) if move.valid and not move.won else move
