"""Random episodes, and the same episodes as trajectories in append and memory context, and as sessions of an agent.

In memory context, the prompt of each turn contains all earlier tokens, as in append context. A model then has the same
log-probs for every sampled token, and both contexts must give the same results. A session has the turns of an episode
in up to three rows in any order. In each row, the tokens of the turns in other rows are context. A part of each
turn's reward belongs to an answer after it that is not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from alphaapollo.rollout.token_context import build_row
from alphaapollo.types import EpisodeEnd, Outcome, Row, Score, Trajectory, Turn
from tests.builders import make_completion, make_group, make_trajectory, make_turn

Context = Literal["append", "memory", "session"]
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
        for number, action in enumerate(self.actions):
            past = past + action.context
            shown = action.context if context == "append" else past
            fields = {"reward": action.reward, "valid": action.valid, "info": {"state": action.state}}
            completion = make_completion(action.tokens, action.logprobs)
            turns.append(make_turn(completion, shown, answer_number=2 * number, **fields))
            past = past + action.tokens
        ids = {"sample": self.sample, "prompt_id": self.prompt}
        made = make_trajectory(*turns, score=self.score, memory=context != "append", end=self.end, **ids)
        return self._as_session(made) if context == "session" else made

    def _as_session(self, episode: Trajectory) -> Trajectory:
        generator = np.random.default_rng([self.prompt, self.sample, len(self.actions)])
        branches = generator.integers(0, 3, len(episode.turns))
        turns, rows, first_prompt = list[Turn](), list[Row](), len(episode.turns[0].context_ids)
        for branch in generator.permutation(3):
            own = [turn for turn, number in zip(episode.turns, branches, strict=True) if number == branch]
            if own:
                length = 0
                for turn in own:
                    prompt = turn.context_ids
                    turn.context_ids, length = prompt[length:], len(prompt) + len(turn.completion.token_ids)
                rows.append(build_row(own, len(turns), len(own[0].context_ids) - first_prompt))
                turns += own
        for turn in episode.turns:
            turn.reward /= 2
            later = {"reward": turn.reward, "answer_number": turn.answer_number + 1}
            turns.append(make_turn([], turn.context_ids, **later))
        return replace(episode, turns=turns, rows=rows)


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
