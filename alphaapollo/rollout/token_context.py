"""Token contexts: they build the engine's prompts for the turns of one episode, and the rows to train on.

    append   one growing sequence: prompt + action + observation + action + ...                 -> one Row
    memory   a new prompt each turn, from the first observation and a few remembered steps      -> one Row per turn

A Row (token sequence to train on) has exactly the engine's prompts and sampled tokens, and the images of its prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from alphaapollo.data.chats import add_system_message
from alphaapollo.data.images import collect_images, find_placeholders
from alphaapollo.data.prompts import Truncation, truncate_prompt
from alphaapollo.environments.base import Environment, EnvironmentFailure, wrap_environment_errors
from alphaapollo.environments.memory import MemoryType, Step, select_steps
from alphaapollo.rollout.environment_replies import check_messages
from alphaapollo.types import EncodedImage, ImageInput, Message, Row, Turn
from alphaapollo.utils.kept_tokens import KeptTokens

RenderObservation = Callable[[list[Message], int | None], list[int]]
PrepareImages = Callable[[list[Message] | str], tuple[ImageInput, ...]]
CACHE_SIZE = 256  # rendered prompts


def build_append_context_rows(turns: Sequence[Turn]) -> list[Row]:
    """Build the only training row of an append-context episode: context_0 + action_0 + context_1 + action_1 + ..."""
    return [build_row(turns)] if turns else []


def build_memory_context_rows(turns: Sequence[Turn]) -> list[Row]:
    """Build the training rows of a memory-context episode: for each turn its prompt, then its action."""
    num_earlier_tokens = accumulate((len(turn.completion.token_ids) for turn in turns), initial=0)
    pairs = zip(turns, num_earlier_tokens, strict=False)
    return [build_row([turn], index, num_earlier) for index, (turn, num_earlier) in enumerate(pairs)]


def build_row(turns: Sequence[Turn], first_turn: int = 0, num_earlier_tokens: int = 0) -> Row:
    """Build the training row of some turns of an episode, the first of which has the index `first_turn`. Action tokens
    have mask 1 and the engine's log-probs; context tokens have mask 0 and log-prob 0. num_earlier_tokens: see Row."""
    token_ids: list[int] = []
    action_mask: list[int] = []
    logprobs: list[float] = []
    ends: list[int] = []
    parts: dict[str, list[Any]] = defaultdict(list)  # Completion.columns of each turn's new tokens
    for turn in turns:
        context, action = turn.context_ids, turn.completion
        token_ids += [*context, *action.token_ids]
        action_mask += [0] * len(context) + [1] * len(action.token_ids)
        logprobs += [0.0] * len(context) + [*action.logprobs]
        previous_end = ends[-1] if ends else 0
        ends.append(len(token_ids) - 1)
        for name, values in action.columns.items():
            parts[name].append(values[previous_end : ends[-1]])
    groups = groupby((run for turn in turns for run in turn.completion.weight_versions), itemgetter(0))
    versions = [(version, sum(count for _, count in group)) for version, group in groups]
    # The engine returns no values for the last token. Those of the token before are repeated; training ignores them.
    columns = {
        name: _join_values([*values, values[-1][-1:]]) for name, values in parts.items() if len(values) == len(turns)
    }
    images = tuple(image for turn in turns for image in turn.context_images)
    return Row(token_ids, action_mask, logprobs, ends, first_turn, versions, images, columns, num_earlier_tokens)


def _join_values(parts: Sequence[Any]) -> Any:
    return KeptTokens.concatenate(parts).encode() if isinstance(parts[0], KeptTokens) else np.concatenate(parts)


class AppendContext:
    """Append context: one token sequence that grows each turn. Sampled tokens are never tokenized again."""

    build_rows = staticmethod(build_append_context_rows)
    uses_budget = True  # whether the context tokens of the second and later turns count towards the episode's budget

    def __init__(
        self,
        render_prompt: Callable[[list[Message] | str], list[int]],
        render_observation: RenderObservation,
        prepare_images: PrepareImages,
    ):
        self._render_prompt, self._render_observation = render_prompt, render_observation
        self._prepare_images = prepare_images
        self.prompt_ids: list[int] = []  # the engine's next prompt
        self.prompt_images: tuple[ImageInput, ...] = ()  # images in prompt_ids

    def start_episode(self, first_observation: list[Message] | str) -> None:
        """Start the episode: set `prompt_ids` and `prompt_images` to the first prompt."""
        self.prompt_ids = self._render_prompt(first_observation)
        with wrap_environment_errors("preparing the images"):
            self.prompt_images = self._prepare_images(first_observation)

    def add_turn_and_get_context(
        self, action_ids: Sequence[int], step: Step
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Add an action of the model and the observation that follows. Returns tokens and images of the next turn's
        context: here those of the observation, in MemoryContext those of the complete new prompt."""
        with wrap_environment_errors("rendering the observation"):
            observation_ids = self._render_observation(step.observation, action_ids[-1])
            images = self._prepare_images(step.observation)
        self.prompt_ids = [*self.prompt_ids, *action_ids, *observation_ids]
        self.prompt_images += images
        return observation_ids, images


class MemoryContext(AppendContext):
    """Memory context: a new prompt each turn, from the first observation and the remembered steps as messages.

    If the environment has a method `recall(steps)`, that method builds the messages. If the prompt is too long, the
    oldest steps are dropped."""

    build_rows = staticmethod(build_memory_context_rows)
    uses_budget = False  # prompts are limited by data.max_prompt_length instead

    def __init__(
        self,
        environment: Environment,
        prompts: PromptRenderer,
        prepare_images: PrepareImages,
        history_length: int,
        memory_type: MemoryType,
        system_prompt: str = "",
    ):
        super().__init__(prompts, lambda observation, last: [], prepare_images)
        self._recall = getattr(environment, "recall", self._build_history_messages)
        self._is_within_limit = prompts.is_within_limit
        self._history_length, self._memory_type, self._system_prompt = history_length, memory_type, system_prompt
        self._first_observation: list[Message] = []
        self._steps: list[Step] = []

    def start_episode(self, first_observation: list[Message] | str) -> None:
        if isinstance(first_observation, str):
            first_observation = [Message(role="user", content=first_observation)]
        self._first_observation = first_observation
        super().start_episode(first_observation)

    def add_turn_and_get_context(
        self, action_ids: Sequence[int], step: Step
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        self._steps.append(step)
        chosen = select_steps(self._steps, self._history_length, self._memory_type)
        messages = self._recall_messages(chosen)
        while len(chosen) > 1 and not self._is_within_limit(messages):
            chosen = chosen[1:]
            messages = self._recall_messages(chosen)
        super().start_episode(messages)
        return self.prompt_ids, self.prompt_images

    def _recall_messages(self, steps: Sequence[Step]) -> list[Message]:
        with wrap_environment_errors("recall"):
            messages = self._recall(steps)
        return add_system_message(check_messages(messages, "recall"), self._system_prompt)

    def _build_history_messages(self, steps: Sequence[Step]) -> list[Message]:
        past = [[Message(role="assistant", content=step.action), *step.observation] for step in steps]
        return [*self._first_observation, *(message for messages in past for message in messages)]


def check_rows_match_turns(
    rows: Sequence[Row],
    turns: Sequence[Turn],
    engine_prompts: Sequence[list[int]],
    engine_images: Sequence[tuple[ImageInput, ...]],
    placeholder_id: int | None = None,
) -> None:
    """Assert that training rows have exactly the tokens and images that the engine received and sampled, and one
    placeholder per image feature. engine_prompts, engine_images: of each turn. placeholder_id: token of a
    vision-language model, which must never be sampled."""
    for row in rows:
        expected_mask = [0] * len(row.token_ids)
        row_turns = slice(row.first_turn, row.first_turn + len(row.turn_ends))
        prompts = zip(engine_prompts[row_turns], engine_images[row_turns], strict=True)
        images: tuple[ImageInput, ...] = ()  # of the last turn
        for turn, (prompt, images), end in zip(turns[row_turns], prompts, row.turn_ends, strict=True):
            start = end + 1 - len(turn.completion.token_ids)
            assert row.token_ids[:start] == prompt, "a row's tokens before an action differ from the engine's prompt"
            assert row.images[: len(images)] == images, "a row's images before an action differ from the engine's"
            assert placeholder_id not in turn.completion.token_ids, "the model sampled a placeholder of images"
            action_ids = turn.completion.token_ids
            assert row.token_ids[start : end + 1] == action_ids, "a row's action differs from the sampled tokens"
            expected_mask[start : end + 1] = [1] * len(action_ids)
        assert len(row.images) == len(images), "a row has images that the engine did not receive"
        find_placeholders(row.token_ids, row.images)  # asserts the number of placeholders
        assert list(row.action_mask) == expected_mask, "the action mask does not cover exactly the sampled tokens"
        assert sum(n for _, n in row.weight_versions) == sum(row.action_mask), "a sampled token has no weight version"


class PromptTooLong(EnvironmentFailure):
    """Error: a prompt is longer than data.max_prompt_length, and may not be truncated."""


class PromptRenderer:
    """Callable that renders messages or text to prompt tokens, and truncates or rejects more than `max_tokens`.

    The last CACHE_SIZE prompts are cached, because chat templates are slow and the episodes of a group start with the
    same prompt. Prompts of datasets are checked before training. A prompt that is too long therefore comes from an
    environment, and fails the episode, not the run. Prompts with images are never truncated."""

    def __init__(self, render: Callable[[list[Message] | str], list[int]], max_tokens: int, truncation: Truncation):
        self._render, self._max_tokens, self._truncation = render, max_tokens, truncation
        self._rendered: dict[tuple[str, tuple[EncodedImage, ...]], list[int]] = {}

    def __call__(self, content: list[Message] | str) -> list[int]:
        """Return the prompt's tokens as a new list. Raises PromptTooLong, or EnvironmentFailure if the chat template or
        the tokenizer raises an error."""
        token_ids = self._render_cached(content)
        has_images = bool(collect_images(content))
        if len(token_ids) <= self._max_tokens or (self._truncation in ("left", "right") and not has_images):
            return list(truncate_prompt(token_ids, self._max_tokens, self._truncation))
        fix = "use smaller images" if has_images else "set data.truncation to left or right"
        raise PromptTooLong(
            f"the observation has {len(token_ids)} tokens, more than data.max_prompt_length={self._max_tokens}. "
            f"Increase data.max_prompt_length, or {fix}."
        )

    def is_within_limit(self, content: list[Message] | str) -> bool:
        return len(self._render_cached(content)) <= self._max_tokens

    def _render_cached(self, content: list[Message] | str) -> list[int]:
        texts = (
            content
            if isinstance(content, str)
            else [{**message, "images": len(message.get("images", ()))} for message in content]
        )
        key = repr(texts), tuple(collect_images(content))  # fast for large images: Python keeps the hash of bytes
        token_ids = self._rendered.get(key)
        if token_ids is None:
            with wrap_environment_errors("rendering the observation"):
                token_ids = self._rendered[key] = self._render(content)
            if len(self._rendered) > CACHE_SIZE:
                del self._rendered[next(iter(self._rendered))]  # the oldest
        return token_ids
