"""The same game with an environment that always says `higher`: what is found by a player who is told nothing."""

from __future__ import annotations

from alphaapollo.environments.base import register_environment
from alphaapollo.environments.guessing_game import HIGHER, GuessingGame
from alphaapollo.environments.text_game import Move


@register_environment("deaf_guessing_game")
class DeafGuessingGame(GuessingGame):
    def play(self, action: str) -> Move:
        move = super().play(action)
        return Move(HIGHER) if move.valid and not move.won else move
