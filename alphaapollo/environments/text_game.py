"""Base class of seeded text games: one move per turn, at most env.max_steps turns, score 1 if won, else 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from alphaapollo.config.schema import Env
from alphaapollo.environments.action_parser import read_action
from alphaapollo.environments.base import Observation, Services, StepResult
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.seeds import derive_seed


def derive_instance_seed(config: Env, prompt: Prompt) -> int:
    """Return the random seed of the task of a prompt, equal for all its samples. It depends on env.seed and
    env_kwargs.seed; if a row has no env_kwargs.seed, on its position in the data."""
    seed = prompt.env_kwargs.get("seed")
    return derive_seed(config.seed, config.env_name, prompt.id if seed is None else int(seed))


@dataclass(frozen=True, slots=True)
class MoveResult:
    """Result of one move in a text game."""

    text: str  # message to the model
    won: bool = False
    valid: bool = True
    reward: float = 0.0  # of this move, in addition to the score of the game


class TextGame(ABC):
    """Environment of one game. Subclasses define `begin`, `prompt`, `play` and `state`."""

    def __init__(self, services: Services):
        self.config, self.settings, self._services = services.config, services.settings, services
        self._turns = 0

    @abstractmethod
    def begin(self, rng: Random) -> None:
        """Set up a new game. `rng` must be the only source of randomness, so that equal seeds give equal games."""

    @abstractmethod
    def prompt(self) -> str:
        """Return the instructions and the current state of the game."""

    @abstractmethod
    def play(self, action: str) -> MoveResult:
        """Execute an action. For an invalid action, return a MoveResult with valid=False and an explanation."""

    @abstractmethod
    def state(self) -> str:
        """Return a key of the current game state, e.g. the position. Equal keys must mean the same state of a game."""

    async def reset(self, prompt: Prompt) -> Observation:
        self.begin(Random(derive_instance_seed(self.config, prompt)))
        return Observation([Message(role="user", content=self.prompt())])

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        state = self.state()
        found = read_action(action, allow_bare_word=True, turns=self._services.turns)
        error = f"invalid action: {found.error}"
        move = MoveResult(error, valid=False) if found.error else self.play(found.content)
        done = move.won or self._turns >= self.config.max_steps
        return StepResult(
            observation=None if done else Observation([Message(role="user", content=move.text)]),
            done=done,
            reward=move.reward,
            valid=move.valid,
            score=Score(float(move.won), {"accuracy": float(move.won)}) if done else None,
            kept_chars=found.kept_chars if move.valid else None,
            info={"state": state},
        )

    async def close(self) -> None:
        return
