"""Random episodes, and the same episodes as trajectories in append and memory context.

In memory context, the prompt of each turn contains all earlier tokens, as in append context. A model then has the same
log-probs for every sampled token, and both contexts must give the same results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from alphaapollo.types import EpisodeEnd, Outcome, Score, Trajectory
from tests.builders import make_completion, make_group, make_trajectory, make_turn

Context = Literal["append", "memory"]
VOCABULARY = 48
MAX_LENGTH = 60  # maximum response length, for penalties and horizons
STEP_REWARDS = (-0.1, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Action:
    """A random turn. `first` is the number of its first token among all sampled tokens of the case."""

    context: list[int]  # tokens of the environment
    tokens: list[int]
    logprobs: list[float]
    first: int
    reward: float
    valid: bool
    state: int


@dataclass(frozen=True)
class Episode:
    prompt: int
    sample: int
    actions: list[Action]
    score: Score
    end: EpisodeEnd

    def trajectory(self, context: Context) -> Trajectory:
        past: list[int] = []
        turns = []
        for action in self.actions:
            past = past + action.context
            shown = action.context if context == "append" else past
            fields = {"reward": action.reward, "valid": action.valid, "info": {"state": action.state}}
            turns.append(make_turn(make_completion(action.tokens, action.logprobs), shown, **fields))
            past = past + action.tokens
        ids = {"sample": self.sample, "prompt_id": self.prompt}
        return make_trajectory(*turns, score=self.score, memory=context == "memory", end=self.end, **ids)


@dataclass
class Draw:
    """Draw the episodes of one case from one generator."""

    generator: np.random.Generator
    plain: bool  # only rewards 0 and 1, for the closed form of pass@k
    num_tokens: int = 0
    groups: list[list[Episode]] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return bool(self.generator.random() < probability)

    def tokens(self, low: int, high: int) -> list[int]:
        return self.generator.integers(2, VOCABULARY, self.generator.integers(low, high + 1)).tolist()

    def group(self, prompt: int, size: int) -> list[Episode]:
        """Draw a group. Sometimes all samples have the same reward, with or without step rewards."""
        start, equal = self.tokens(1, 5), self.chance(0.25)
        value = float(self.generator.integers(0, 2))
        return [
            self.episode(prompt, sample, start, value if equal else None, may_fail=sample > 0) for sample in range(size)
        ]

    def episode(self, prompt: int, sample: int, start: list[int], value: float | None, may_fail: bool) -> Episode:
        bare = self.plain or value is not None
        actions = []
        for turn in range(int(self.generator.integers(1, 5))):
            tokens = self.tokens(1, 5)
            actions.append(
                Action(
                    context=start if turn == 0 else self.tokens(1, 4),
                    tokens=tokens,
                    logprobs=(-4 * self.generator.random(len(tokens))).astype(np.float32).tolist(),
                    first=self.num_tokens,
                    reward=0.0 if bare or self.chance(0.5) else float(self.generator.choice(STEP_REWARDS)),
                    valid=self.plain or self.chance(0.85),
                    state=int(self.generator.integers(0, 3)),
                )
            )
            self.num_tokens += len(tokens)
        return Episode(prompt, sample, actions, self.score(value, may_fail), self.end())

    def score(self, value: float | None, may_fail: bool) -> Score:
        if may_fail and self.chance(0.15):
            failed = Outcome.GRADER_FAILED if self.chance(0.5) else Outcome.ENVIRONMENT_FAILED
            return Score(float("nan"), {}, failed, "drawn")
        if value is None:
            whole = self.plain or self.chance(0.7)
            value = float(self.generator.integers(0, 2)) if whole else float(self.generator.normal())
        parts = {"accuracy": value, "task": value, "format": float(self.generator.integers(0, 2))}
        return Score(value, parts)

    def end(self) -> EpisodeEnd:
        return EpisodeEnd.TOKEN_LIMIT if self.chance(0.2) else EpisodeEnd.DONE


@dataclass(frozen=True)
class Episodes:
    """Episodes of one case: groups of samples, and a greedy episode per prompt."""

    groups: list[list[Episode]]
    greedy: list[Episode]
    num_tokens: int  # that were sampled

    @classmethod
    def draw(cls, generator: np.random.Generator, plain: bool) -> Episodes:
        draw = Draw(generator, plain)
        sizes = generator.integers(1, 5, int(generator.integers(1, 5)))
        groups = [draw.group(prompt, int(size)) for prompt, size in enumerate(sizes)]
        greedy = [draw.episode(prompt, 99, draw.tokens(1, 5), None, may_fail=False) for prompt in range(len(sizes))]
        return cls(groups, greedy, draw.num_tokens)

    @property
    def largest_group(self) -> int:
        return max(sum(not one.score.outcome.failed for one in group) for group in self.groups)

    def trajectory_groups(self, context: Context, baseline: bool, order: np.random.Generator | None):
        """Trajectory groups for the driver. `order` shuffles the prompts and the samples of each."""
        groups = []
        for episodes, greedy in zip(self.groups, self.greedy, strict=True):
            samples = [one.trajectory(context) for one in _shuffled(episodes, order)]
            alone = greedy.trajectory(context) if baseline else None
            groups.append(make_group(*samples, baseline=alone, length_budget=10))
        return _shuffled(groups, order)

    def first_tokens(self) -> dict[tuple[int, int], list[int]]:
        """(prompt, sample) -> number of the first token of each turn."""
        return {(one.prompt, one.sample): [act.first for act in one.actions] for group in self.groups for one in group}


def _shuffled(values: list, order: np.random.Generator | None) -> list:
    return values if order is None else [values[i] for i in order.permutation(len(values))]
