"""Token contexts of an episode: they build the prompts of its turns. Each object serves one episode.

    append   one growing sequence: prompt + action + observation + action + ...                 -> one Row
    memory   a new prompt each turn, from the first observation and a few remembered steps      -> one Row per turn

Rows contain exactly the engine's prompts and sampled tokens. `prompt_ids` is the engine's next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alphaapollo.environments.base import Environment, wrap_environment_errors
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.rollout.check_replies import check_messages
from alphaapollo.types import Completion, Message, Row, Turn

RenderPrompt = Callable[[list[Message] | str], list[int]]
RenderDelta = Callable[[list[Message], int | None], list[int]]


def build_append_rows(turns: Sequence[Turn]) -> list[Row]:
    """Build the row of an append-context trajectory: context_0 + action_0 + context_1 + action_1 + ...

    Action tokens have mask 1 and the engine's log-probs; context tokens have mask 0 and log-prob 0. Returns an empty
    list if there are no turns.
    """
    return [_build_row(turns)] if turns else []


def build_memory_rows(turns: Sequence[Turn]) -> list[Row]:
    """Build one row per turn: the prompt of the turn, then its action."""
    return [_build_row([turn], first_turn) for first_turn, turn in enumerate(turns)]


def collect_experts(completions: Sequence[Completion], ends: Sequence[int]) -> np.ndarray | None:
    """Return the routed experts [T, layers, k] of a row's tokens, or None if the engine returned none.

    The experts of a token come from the first completion that ends after it. The engine never computes the last token
    of a row: it gets the experts of the previous token, and training does not use its outputs.

    `ends`: position of each completion's last token.
    """
    parts: list[np.ndarray] = []
    known = 0
    for completion, end in zip(completions, ends, strict=True):
        if completion.routed_experts is None:
            return None
        parts.append(completion.routed_experts[known:end])
        known = end
    return np.concatenate([*parts, parts[-1][-1:]])


def _build_row(turns: Sequence[Turn], first_turn: int = 0) -> Row:
    """Concatenate the contexts and actions of the turns."""
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
    experts = collect_experts([turn.completion for turn in turns], ends)
    return Row(token_ids, action_mask, logprobs, ends, first_turn, versions, experts)


class AppendContext:
    """Append context: one growing token sequence. Sampled tokens are never decoded and rendered again."""

    rows = staticmethod(build_append_rows)

    def __init__(self, render_prompt: RenderPrompt, render_delta: RenderDelta):
        self._render_prompt, self._render_delta = render_prompt, render_delta
        self.prompt_ids: list[int] = []

    def begin(self, content: list[Message] | str) -> list[int]:
        """Start the episode with the first observation and return its prompt tokens."""
        self.prompt_ids = self._render_prompt(content)
        return self.prompt_ids

    def extend(self, action_ids: Sequence[int], step: Step) -> list[int]:
        """Add an action and the following observation. Return the context of the next turn: the tokens of the
        observation (append context) or the complete new prompt (memory context)."""
        with wrap_environment_errors("rendering the observation"):
            delta = self._render_delta(step.observation, action_ids[-1])
        self.prompt_ids = [*self.prompt_ids, *action_ids, *delta]
        return delta

    def count_budget_tokens(self, context_ids: list[int]) -> int:
        """Return how many tokens of the response budget the context of a later turn uses."""
        return len(context_ids)


class MemoryContext:
    """Memory context: a new prompt each turn, from the first observation and the remembered steps as messages.

    An environment with a method `recall(steps)` builds the messages instead. If the prompt is too long, the oldest
    steps are dropped first.
    """

    rows = staticmethod(build_memory_rows)

    def __init__(
        self,
        environment: Environment,
        render_prompt: RenderPrompt,
        is_within_limit: Callable[[list[Message]], bool],
        history_length: int,
        kind: MemoryType,
    ):
        self._recall = getattr(environment, "recall", self._build_messages)
        self._render_prompt, self._is_within_limit = render_prompt, is_within_limit
        self._history_length, self._kind = history_length, kind
        self._first: list[Message] = []
        self._steps: list[Step] = []
        self.prompt_ids: list[int] = []

    def begin(self, content: list[Message] | str) -> list[int]:
        self._first = [Message(role="user", content=content)] if isinstance(content, str) else content
        self.prompt_ids = self._render_prompt(self._first)
        return self.prompt_ids

    def extend(self, action_ids: Sequence[int], step: Step) -> list[int]:
        self._steps.append(step)
        chosen = select_steps(self._steps, self._history_length, self._kind)
        messages = self._recall_messages(chosen)
        while len(chosen) > 1 and not self._is_within_limit(messages):
            chosen = chosen[1:]
            messages = self._recall_messages(chosen)
        self.prompt_ids = self._render_prompt(messages)
        return self.prompt_ids

    def count_budget_tokens(self, context_ids: list[int]) -> int:
        return 0  # limited by data.max_prompt_length instead

    def _recall_messages(self, steps: Sequence[Step]) -> list[Message]:
        with wrap_environment_errors("recall"):
            messages = self._recall(steps)
        return check_messages(messages, "recall")

    def _build_messages(self, steps: Sequence[Step]) -> list[Message]:
        past = [[Message(role="assistant", content=step.action), *step.observation] for step in steps]
        return [*self._first, *(message for messages in past for message in messages)]


Context = AppendContext | MemoryContext


def check_rows(rows: Sequence[Row], turns: Sequence[Turn], engine_prompts: Sequence[list[int]]) -> None:
    """Assert that each action follows the engine's prompt and that the action mask covers exactly the sampled tokens.

    engine_prompts: token ids of the prompts that the engine received, one list per turn.
    """
    for row in rows:
        row_turns = turns[row.first_turn : row.first_turn + len(row.turn_ends)]
        spans = []
        for turn, before, end in zip(row_turns, engine_prompts[row.first_turn :], row.turn_ends, strict=False):
            start = end + 1 - len(turn.completion.token_ids)
            assert row.token_ids[:start] == before, "a row's tokens before an action differ from the engine's prompt"
            assert row.token_ids[start : end + 1] == turn.completion.token_ids, (
                "a row's action differs from the sampled tokens"
            )
            spans.append((start, end + 1))
        assert sum(row.action_mask) == sum(end - start for start, end in spans), "the mask covers more than actions"
        assert all(all(row.action_mask[start:end]) for start, end in spans), "the mask misses an action"
        assert len(row.weight_versions) == sum(row.action_mask), "a sampled token has no weight version"
