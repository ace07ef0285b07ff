"""Base class of seeded text games: one move a turn, at most env.max_steps turns, score 1 if won and 0 otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult
from alphaapollo.environments.tag_parser import read_action
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.seeds import derive_seed


def instance_seed(config: Env, prompt: Prompt) -> int:
    """Seed of a prompt's instance, the same for all samples of a group.

    Depends on env.seed and the row's env_kwargs.seed, which `examples.data_preprocess.prepare` makes different for
    training and validation; without it, on the row's position.
    """
    seed = prompt.env_kwargs.get("seed")
    return derive_seed(config.seed, config.env_name, prompt.id if seed is None else int(seed))


def fill_template(template: str, **values: object) -> str:
    """Replace each `{name}` by its value; other braces stay as they are."""
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template


@dataclass(frozen=True, slots=True)
class MoveResult:
    """Result of one move."""

    text: str  # for the model
    won: bool = False
    valid: bool = True


class TextGame(ABC):
    """One episode of a game. Subclasses define `begin`, `prompt`, `play` and `state`."""

    def __init__(self, services: Services):
        self.config = services.config
        self._turns = 0

    @abstractmethod
    def begin(self, rng: Random) -> None:
        """Set up the instance; `rng` is its only source of randomness."""

    @abstractmethod
    def prompt(self) -> str:
        """The instructions and the current situation."""

    @abstractmethod
    def play(self, action: str) -> MoveResult:
        """Execute the action, or return an invalid move that explains the problem."""

    @abstractmethod
    def state(self) -> str:
        """Key of the situation: within an instance, equal keys mean that equal moves have equal consequences."""

    async def reset(self, prompt: Prompt) -> Observation:
        self.begin(Random(instance_seed(self.config, prompt)))
        return Observation([Message(role="user", content=self.prompt())])

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        state = self.state()
        found = read_action(action, bare_word=True)
        if found.problem:
            move = MoveResult(f"invalid action: {found.problem}", valid=False)
        else:
            move = self.play(found.content)
        done = move.won or self._turns >= self.config.max_steps
        return StepResult(
            observation=None if done else Observation([Message(role="user", content=move.text)]),
            done=done,
            valid=move.valid,
            score=Score(float(move.won), {"accuracy": float(move.won)}) if done else None,
            kept_chars=found.kept_chars if move.valid else None,
            info={"state": state},
        )

    async def close(self) -> None:
        return
