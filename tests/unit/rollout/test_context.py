"""Prompts of later turns. Tokens are small numbers, and text is these numbers separated by spaces."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from alphaapollo.environments.memory import Step
from alphaapollo.rollout.context import (
    MemoryContext,
    PromptRenderer,
    build_append_context_rows,
    build_memory_context_rows,
    check_rows_match_turns,
)
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeRunner, EpisodeTask
from alphaapollo.types import EpisodeEnd, Message, Outcome, Sampling, Turn
from tests.builders import make_completion, make_turn
from tests.unit.rollout.test_episode import PROMPT, STOP, Environment, Numbers, answers, done, show


def render(content: list[Message] | str) -> list[int]:
    """Renders a chat as the numbers of its messages."""
    messages = [content] if isinstance(content, str) else [message["content"] for message in content]
    return [int(word) for message in messages for word in message.split()]


def play(engine, environment, history_length: int = 2, longest: int = 100, truncation: str = "error"):
    prompts = PromptRenderer(render, longest, truncation)

    def make_token_context(environment, _):
        return MemoryContext(environment, prompts, lambda _: (), history_length, "simple")

    runner = EpisodeRunner(engine, Numbers().decode, make_token_context, EpisodeLimits(9, 5.0))
    sampling = Sampling(20, stop_token_ids=(STOP,))
    task = EpisodeTask(PROMPT, 0, lambda _: environment, sampling, lambda turn: turn, "t")
    return asyncio.run(runner.run(task))


def test_every_turn_is_a_row_with_a_new_prompt():
    engine, asked = answers([5, STOP], [6], [7])
    trajectory = play(engine, Environment(show("3", reward=0.5), show("4"), done(1.0)), history_length=1)
    assert [seen for seen, _ in asked] == [[1, 2], [1, 2, 5, 3], [1, 2, 6, 4]]
    assert [sampling.max_tokens for _, sampling in asked] == [20, 18, 17]  # only what is sampled counts
    assert [row.token_ids for row in trajectory.rows] == [[1, 2, 5, STOP], [1, 2, 5, 3, 6], [1, 2, 6, 4, 7]]
    assert [row.action_mask for row in trajectory.rows] == [[0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    assert [row.first_turn for row in trajectory.rows] == [0, 1, 2]
    assert [row.turn_ends for row in trajectory.rows] == [[3], [4], [4]]
    assert trajectory.end is EpisodeEnd.DONE


def test_oldest_step_is_dropped_when_the_prompt_is_full():
    engine, asked = answers([5], [6], [7])
    play(engine, Environment(show("3"), show("4"), done(1.0)), history_length=2, longest=5)
    assert asked[2][0] == [1, 2, 6, 4]  # 1 2 5 3 6 4 would be six


class Recalling(Environment):
    def recall(self, steps: list[Step]) -> list[Message]:
        return [Message(role="user", content=" ".join(["8", *(step.action for step in steps)]))]


def test_environment_may_write_its_own_prompt():
    engine, asked = answers([5], [6])
    play(engine, Recalling(show("3"), done(1.0)))
    assert asked[1][0] == [8, 5]


@pytest.mark.parametrize("truncation", ["error", "drop"])
def test_a_prompt_that_grows_too_long_is_a_limit(truncation):
    engine, asked = answers([5], [6])
    environment = Environment(show("3"), show("4 4 4"))  # 1 2 6 4 4 4 is longer than 5, whatever is forgotten
    trajectory = play(engine, environment, longest=5, truncation=truncation)
    assert trajectory.end is EpisodeEnd.TOKEN_LIMIT and environment.closed
    assert trajectory.score.outcome is Outcome.SCORED and trajectory.score.reward == 0
    for fact in ("6 tokens", "data.max_prompt_length=5"):
        assert fact in trajectory.score.reason
    assert [seen for seen, _ in asked] == [[1, 2], [1, 2, 5, 3]]  # no second attempt: it would be the same
    assert [row.token_ids for row in trajectory.rows] == [[1, 2, 5], [1, 2, 5, 3, 6]]


def test_a_first_prompt_that_is_too_long_is_a_failure():
    engine, asked = answers()
    trajectory = play(engine, Environment(), longest=1, truncation="error")
    assert trajectory.end is EpisodeEnd.PROMPT_LIMIT and asked == []
    assert trajectory.score.outcome is Outcome.ENVIRONMENT_FAILED


@pytest.mark.parametrize(
    ("recalled", "reason"),
    [
        (KeyError("board"), "KeyError: 'board' (attempt 2 of 2)"),
        (None, ""),
        ([], ""),
        (["1 2"], ""),
        ([{"role": "user"}], ""),
        ([{"role": "user", "content": 7}], ""),
        ([{"content": "1"}], ""),
    ],
)
def test_a_recall_that_raises_or_has_a_wrong_type_is_an_environment_failure(recalled, reason):
    class Wrong(Environment):
        def recall(self, steps: list[Step]) -> object:
            return self._say(recalled)

    engine, _ = answers([5], [5])
    trajectory = play(engine, Wrong(show("3"), show("3")))
    assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert trajectory.score.reason.startswith(f"recall: {reason}")


def test_no_turns_make_no_row():
    assert build_append_context_rows([]) == [] == build_memory_context_rows([])


def test_rows_must_equal_the_engine_prompts():
    turns = [make_turn([2, 3], [1]), make_turn([5], [4])]
    rows = build_append_context_rows(turns)
    check_rows_match_turns(rows, turns, [[1], [1, 2, 3, 4]], [(), ()])
    with pytest.raises(AssertionError, match="differ from the engine's prompt"):
        check_rows_match_turns(rows, turns, [[1], [1, 2, 4]], [(), ()])
    rows[0].action_mask[0] = 1
    with pytest.raises(AssertionError, match="does not cover exactly the sampled"):
        check_rows_match_turns(rows, turns, [[1], [1, 2, 3, 4]], [(), ()])
    fresh = build_memory_context_rows(turns)
    check_rows_match_turns(fresh, turns, [[1], [4]], [(), ()])
    fresh[1].token_ids[-1] = 9
    with pytest.raises(AssertionError, match="differs from the sampled tokens"):
        check_rows_match_turns(fresh, turns, [[1], [4]], [(), ()])


def routed(context_ids: list[int], actions: int, tokens: int, cut: int = 0) -> Turn:
    """A turn with expert ids equal to positions, one layer and one expert per token."""
    experts = np.arange(tokens, dtype=np.uint8).reshape(-1, 1, 1)
    return make_turn(make_completion([5] * (actions - cut), columns={"routed_experts": experts}), context_ids)


def test_experts_of_a_row_come_from_the_turn_that_computed_them():
    """Two prompt tokens, an action of three cut to two, three tokens of the environment, an action of two."""
    first, second = routed([1, 2], 3, 2 + 3 - 1, cut=1), routed([7, 8, 9], 2, 7 + 2 - 1)
    second.completion.columns["routed_experts"][:] += 100
    (row,) = build_append_context_rows([first, second])
    assert row.turn_ends == [3, 8]
    # Position 3, the last that is left of the first action, was computed in the second turn; position 8 never.
    assert row.columns["routed_experts"].ravel().tolist() == [0, 1, 2, 103, 104, 105, 106, 107, 107]
    one, other = build_memory_context_rows([first, replace(second, context_ids=[1, 2, 7, 8, 9, 9, 9])])
    assert one.columns["routed_experts"].ravel().tolist() == [0, 1, 2, 2]
    assert other.columns["routed_experts"].ravel().tolist() == [*range(100, 108), 107]
    second.completion = replace(second.completion, columns={})
    assert build_append_context_rows([first, second])[0].columns == {}
