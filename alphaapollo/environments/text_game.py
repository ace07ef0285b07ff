"""What seeded games in text share: the instance's seed, one move a turn, the end after env.max_steps.

A game says how it begins, what a move does, and which state it is in; it is won (score 1) or not (score 0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult
from alphaapollo.environments.read_tags import Unreadable, read_action
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.seeds import derive_seed


def instance_seed(config: Env, prompt: Prompt) -> int:
    """The seed of a prompt's instance: all samples of a group play the same one.

    Rows made by `examples.data_preprocess.prepare` bring env_kwargs.seed, which tells training and validation apart;
    of other rows the position counts.
    """
    seed = prompt.env_kwargs.get("seed")
    return derive_seed(config.seed, config.env_name, prompt.id if seed is None else int(seed))


def fill(template: str, **values: object) -> str:
    """`{name}` becomes the value; other braces stay as they are."""
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template


@dataclass(frozen=True, slots=True)
class Move:
    """What a move came to."""

    text: str  # what the model sees of it
    won: bool = False
    valid: bool = True


class TextGame(ABC):
    """One episode. Subclasses write `begin`, `prompt`, `play`, `state`."""

    step_reward = 0.0

    def __init__(self, services: Services):
        self.config = services.config
        self._turns = 0

    @abstractmethod
    def begin(self, rng: Random) -> None:
        """Set the instance up; `rng` is its only source of chance."""

    @abstractmethod
    def prompt(self) -> str:
        """The instructions and the present situation."""

    @abstractmethod
    def play(self, action: str) -> Move:
        """Do what the action says, or answer with an invalid move that says why not."""

    @abstractmethod
    def state(self) -> str:
        """The same for situations in which the same move has the same consequences (within one instance)."""

    async def reset(self, prompt: Prompt) -> Observation:
        self.begin(Random(instance_seed(self.config, prompt)))
        return Observation([Message(role="user", content=self.prompt())])

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        state = self.state()
        found = read_action(action, bare_word=True)
        if isinstance(found, Unreadable):
            move, kept = Move(f"invalid action: {found.problem}", valid=False), None
        else:
            move, kept = self.play(found.content), found.kept_chars
        done = move.won or self._turns >= self.config.max_steps
        return StepResult(
            observation=None if done else Observation([Message(role="user", content=move.text)]),
            done=done,
            reward=self.step_reward,
            valid=move.valid,
            score=Score(float(move.won), {"accuracy": float(move.won)}) if done else None,
            kept_chars=kept if move.valid else None,
            info={"state": state},
        )

    async def close(self) -> None:
        """A game holds nothing."""
        return
