"""An episode's past as tokens: the environment's reply is appended here, and turns become rows. Two ways, both
token-exact.

    append   one growing sequence: prompt + action + what the environment added + action + ...     -> one Row
    memory   a fresh prompt every turn, from the first observation and a few remembered steps      -> a Row a turn

Either is single-use, like the episode. `seen` is what the engine is shown next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from alphaapollo.environments.base import Environment, blaming
from alphaapollo.environments.memory import MemoryType, Step, select
from alphaapollo.rollout.check_replies import check_messages
from alphaapollo.types import Completion, Message, Row, Turn

RenderPrompt = Callable[[list[Message] | str], list[int]]
RenderDelta = Callable[[list[Message], int | None], list[int]]


class Context(Protocol):
    """The past of one episode."""

    seen: list[int]

    def begin(self, content: list[Message] | str) -> list[int]:
        """The first observation; returns what it adds to `seen`."""
        ...

    def go_on(self, action_ids: Sequence[int], step: Step) -> list[int]:
        """After an action that the environment answered; returns the context of the next turn: what it adds to
        `seen` (append), or all of it (memory)."""
        ...

    def cost(self, context_ids: list[int]) -> int:
        """Tokens of the response budget that a later turn's context takes."""
        ...

    def rows(self, turns: Sequence[Turn]) -> list[Row]:
        """What is trained on."""
        ...


class AppendContext:
    """One sequence. Nothing is rendered twice: sampled tokens stay as they were sampled."""

    def __init__(self, render_prompt: RenderPrompt, render_delta: RenderDelta):
        self._render_prompt, self._render_delta = render_prompt, render_delta
        self.seen: list[int] = []

    def begin(self, content: list[Message] | str) -> list[int]:
        self.seen = self._render_prompt(content)
        return self.seen

    def go_on(self, action_ids: Sequence[int], step: Step) -> list[int]:
        with blaming("rendering its observation"):
            delta = self._render_delta(step.observation, action_ids[-1])
        self.seen = [*self.seen, *action_ids, *delta]
        return delta

    def cost(self, context_ids: list[int]) -> int:
        return len(context_ids)

    def rows(self, turns: Sequence[Turn]) -> list[Row]:
        return append_context_rows(turns)


class MemoryContext:
    """A fresh prompt each turn: the first observation, then the remembered steps as messages; or what the environment's
    own `recall(steps)` makes of them. Where that is longer than a prompt may be, the oldest step is left out first."""

    def __init__(
        self,
        environment: Environment,
        render_prompt: RenderPrompt,
        fits: Callable[[list[Message]], bool],
        history_length: int,
        kind: MemoryType,
    ):
        self._recall = getattr(environment, "recall", self._as_messages)
        self._render_prompt, self._fits = render_prompt, fits
        self._history_length, self._kind = history_length, kind
        self._first: list[Message] = []
        self._steps: list[Step] = []
        self.seen: list[int] = []

    def begin(self, content: list[Message] | str) -> list[int]:
        self._first = [Message(role="user", content=content)] if isinstance(content, str) else content
        self.seen = self._render_prompt(self._first)
        return self.seen

    def go_on(self, action_ids: Sequence[int], step: Step) -> list[int]:
        self._steps.append(step)
        chosen = select(self._steps, self._history_length, self._kind)
        messages = self._remember(chosen)
        while len(chosen) > 1 and not self._fits(messages):
            chosen = chosen[1:]
            messages = self._remember(chosen)
        self.seen = self._render_prompt(messages)
        return self.seen

    def cost(self, context_ids: list[int]) -> int:
        return 0  # a prompt of its own, held against the prompt's limit

    def rows(self, turns: Sequence[Turn]) -> list[Row]:
        return memory_context_rows(turns)

    def _remember(self, steps: Sequence[Step]) -> list[Message]:
        with blaming("recall"):
            messages = self._recall(steps)
        return check_messages(messages, "recall")

    def _as_messages(self, steps: Sequence[Step]) -> list[Message]:
        past = [[Message(role="assistant", content=step.action), *step.observation] for step in steps]
        return [*self._first, *(message for messages in past for message in messages)]


def append_context_rows(turns: Sequence[Turn]) -> list[Row]:
    """The one row of an append-context trajectory: context_0 + action_0 + context_1 + action_1 + ... (none without
    turns). Actions have mask 1 and the engine's log-probs, contexts 0 and 0.0."""
    return [_row(turns)] if turns else []


def memory_context_rows(turns: Sequence[Turn]) -> list[Row]:
    """One row a turn: its whole prompt, then its action."""
    return [_row([turn], first_turn) for first_turn, turn in enumerate(turns)]


def experts_of(completions: Sequence[Completion], ends: Sequence[int]) -> np.ndarray | None:
    """The experts of a row's tokens, each token's from the first completion after it. The last one was never computed:
    it gets its neighbour's, and nothing reads what they make of it.

    `ends`: the position of each completion's last token. None where the engine gave none. -> [T, layers, k]"""
    parts: list[np.ndarray] = []
    known = 0
    for completion, end in zip(completions, ends, strict=True):
        if completion.routed_experts is None:
            return None
        parts.append(completion.routed_experts[known:end])
        known = end
    return np.concatenate([*parts, parts[-1][-1:]])


def _row(turns: Sequence[Turn], first_turn: int = 0) -> Row:
    """These turns, one after the other."""
    token_ids: list[int] = []
    action_mask: list[int] = []
    logprobs: list[float] = []
    ends: list[int] = []
    for turn in turns:
        context, action = turn.context_ids, turn.completion
        token_ids += [*context, *action.token_ids]
        action_mask += [0] * len(context) + [1] * len(action.token_ids)
        logprobs += [0.0] * len(context) + [*action.logprobs]
        ends.append(len(token_ids) - 1)
    versions = [version for turn in turns for version in turn.completion.weight_versions]
    experts = experts_of([turn.completion for turn in turns], ends)
    return Row(token_ids, action_mask, logprobs, ends, first_turn, versions, experts)
