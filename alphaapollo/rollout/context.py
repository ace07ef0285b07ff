"""Token contexts: they build the engine's prompts for the turns of one episode, and the rows to train on.

    append   one growing sequence: prompt + action + observation + action + ...                 -> one Row
    memory   a new prompt each turn, from the first observation and a few remembered steps      -> one Row per turn

A Row (token sequence to train on) has exactly the engine's prompts and sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from alphaapollo.environments.base import Environment, wrap_environment_errors
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.rollout.check_replies import check_messages
from alphaapollo.types import Message, Row, Turn

RenderPrompt = Callable[[list[Message] | str], list[int]]
RenderObservation = Callable[[list[Message], int | None], list[int]]


def build_append_context_rows(turns: Sequence[Turn]) -> list[Row]:
    """Build the only training row of an append-context episode: context_0 + action_0 + context_1 + action_1 + ..."""
    return [build_row(turns)] if turns else []


def build_memory_context_rows(turns: Sequence[Turn]) -> list[Row]:
    """Build the training rows of a memory-context episode: for each turn its prompt, then its action."""
    return [build_row([turn], first_turn) for first_turn, turn in enumerate(turns)]


def build_row(turns: Sequence[Turn], first_turn: int = 0) -> Row:
    """Build the training row of some turns of an episode, the first of which has the index `first_turn`. Action tokens
    have mask 1 and the engine's log-probs; context tokens have mask 0 and log-prob 0."""
    token_ids: list[int] = []
    action_mask: list[int] = []
    logprobs: list[float] = []
    ends: list[int] = []
    experts: list[np.ndarray] = []  # [T, layers, k] of each turn's new tokens, but the last
    for turn in turns:
        context, action = turn.context_ids, turn.completion
        token_ids += [*context, *action.token_ids]
        action_mask += [0] * len(context) + [1] * len(action.token_ids)
        logprobs += [0.0] * len(context) + [*action.logprobs]
        previous_end = ends[-1] if ends else 0
        ends.append(len(token_ids) - 1)
        if action.routed_experts is not None:
            experts.append(action.routed_experts[previous_end : ends[-1]])
    runs = groupby((run for turn in turns for run in turn.completion.weight_versions), itemgetter(0))
    versions = [(version, sum(count for _, count in same)) for version, same in runs]
    # The engine never computes the last token. Training does not use the outputs of the experts that it gets here.
    routed_experts = np.concatenate([*experts, experts[-1][-1:]]) if len(experts) == len(turns) else None
    return Row(token_ids, action_mask, logprobs, ends, first_turn, versions, routed_experts)


class AppendContext:
    """Append context: one token sequence that grows each turn. Sampled tokens are never tokenized again."""

    build_rows = staticmethod(build_append_context_rows)
    uses_budget = True  # whether the context tokens of the second and later turns count towards the episode's budget

    def __init__(self, render_prompt: RenderPrompt, render_observation: RenderObservation):
        self._render_prompt, self._render_observation = render_prompt, render_observation
        self.prompt_ids: list[int] = []  # the engine's next prompt

    def start_episode(self, first_observation: list[Message] | str) -> None:
        """Start the episode: set `prompt_ids` to the tokens of the first prompt."""
        self.prompt_ids = self._render_prompt(first_observation)

    def add_turn_and_get_context(self, action_ids: Sequence[int], step: Step) -> list[int]:
        """Add an action of the model and the observation that follows. Returns the context of the next turn: here the
        tokens of the observation, in MemoryContext the complete new prompt."""
        with wrap_environment_errors("rendering the observation"):
            observation_ids = self._render_observation(step.observation, action_ids[-1])
        self.prompt_ids = [*self.prompt_ids, *action_ids, *observation_ids]
        return observation_ids


class MemoryContext:
    """Memory context: a new prompt each turn, from the first observation and the remembered steps as messages.

    If the environment has a method `recall(steps)`, that method builds the messages. If the prompt is too long, the
    oldest steps are dropped.
    """

    build_rows = staticmethod(build_memory_context_rows)
    uses_budget = False  # prompts are limited by data.max_prompt_length instead

    def __init__(
        self,
        environment: Environment,
        render_prompt: RenderPrompt,
        is_within_limit: Callable[[list[Message]], bool],
        history_length: int,
        memory_type: MemoryType,
    ):
        self._recall = getattr(environment, "recall", self._build_history_messages)
        self._render_prompt, self._is_within_limit = render_prompt, is_within_limit
        self._history_length, self._memory_type = history_length, memory_type
        self._first: list[Message] = []
        self._steps: list[Step] = []
        self.prompt_ids: list[int] = []

    def start_episode(self, first_observation: list[Message] | str) -> None:
        if isinstance(first_observation, str):
            first_observation = [Message(role="user", content=first_observation)]
        self._first = first_observation
        self.prompt_ids = self._render_prompt(self._first)

    def add_turn_and_get_context(self, action_ids: Sequence[int], step: Step) -> list[int]:
        self._steps.append(step)
        chosen = select_steps(self._steps, self._history_length, self._memory_type)
        messages = self._recall_messages(chosen)
        while len(chosen) > 1 and not self._is_within_limit(messages):
            chosen = chosen[1:]
            messages = self._recall_messages(chosen)
        self.prompt_ids = self._render_prompt(messages)
        return self.prompt_ids

    def _recall_messages(self, steps: Sequence[Step]) -> list[Message]:
        with wrap_environment_errors("recall"):
            messages = self._recall(steps)
        return check_messages(messages, "recall")

    def _build_history_messages(self, steps: Sequence[Step]) -> list[Message]:
        past = [[Message(role="assistant", content=step.action), *step.observation] for step in steps]
        return [*self._first, *(message for messages in past for message in messages)]


Context = AppendContext | MemoryContext


def check_rows_match_turns(rows: Sequence[Row], turns: Sequence[Turn], engine_prompts: Sequence[list[int]]) -> None:
    """Assert that training rows have exactly the tokens that the engine received and sampled. `engine_prompts` has the
    token ids of the engine's prompt in each turn."""
    for row in rows:
        expected_mask = [0] * len(row.token_ids)
        row_turns = turns[row.first_turn : row.first_turn + len(row.turn_ends)]
        for turn, before, end in zip(row_turns, engine_prompts[row.first_turn :], row.turn_ends, strict=False):
            start = end + 1 - len(turn.completion.token_ids)
            assert row.token_ids[:start] == before, "a row's tokens before an action differ from the engine's prompt"
            action_ids = turn.completion.token_ids
            assert row.token_ids[start : end + 1] == action_ids, "a row's action differs from the sampled tokens"
            expected_mask[start : end + 1] = [1] * len(action_ids)
        assert list(row.action_mask) == expected_mask, "the action mask does not cover exactly the sampled tokens"
        assert sum(n for _, n in row.weight_versions) == sum(row.action_mask), "a sampled token has no weight version"
