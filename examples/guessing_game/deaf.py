"""Guessing game whose environment always answers `higher`: the baseline of a player without information."""

from __future__ import annotations

from alphaapollo.environments.base import register_environment
from alphaapollo.environments.guessing_game import HIGHER, GuessingGameEnvironment
from alphaapollo.environments.text_game import MoveResult


@register_environment("deaf_guessing_game")
class DeafGuessingGame(GuessingGameEnvironment):
    def play(self, action: str) -> MoveResult:
        move = super().play(action)
        return MoveResult(HIGHER) if move.valid and not move.won else move
