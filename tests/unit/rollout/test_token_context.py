"""Prompts of later turns, truncation, and the rows that are trained."""

from dataclasses import replace

import numpy as np
import pytest

from alphaapollo.environments.base import EnvironmentFailure, Observation
from alphaapollo.environments.memory import Step
from alphaapollo.rollout import token_context
from alphaapollo.rollout.environment_replies import check_reset_reply
from alphaapollo.rollout.token_context import build_row
from alphaapollo.types import EpisodeEnd, Message, Outcome, Turn
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens
from tests.builders import make_completion, make_turn
from tests.unit.rollout.episode_kit import STOP, Environment, done, encode, memory_context, play, show


def test_every_turn_is_a_row_with_a_new_prompt():
    environment = Environment(show("3", reward=0.5), show("4"), done(1.0))
    trajectory, asked = play([[5, STOP], [6], [7]], environment, context=memory_context(history_length=1))
    assert [seen for seen, _ in asked] == [[1, 2], [1, 2, 5, 3], [1, 2, 6, 4]]
    assert [sampling.max_tokens for _, sampling in asked] == [20, 18, 17]  # only what is sampled counts
    assert [row.token_ids for row in trajectory.rows] == [[1, 2, 5, STOP], [1, 2, 5, 3, 6], [1, 2, 6, 4, 7]]
    assert [row.action_mask for row in trajectory.rows] == [[0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    assert [(row.first_turn, row.turn_ends) for row in trajectory.rows] == [(0, [3]), (1, [4]), (2, [4])]
    assert trajectory.end is EpisodeEnd.DONE


def test_oldest_step_is_dropped_when_the_prompt_is_full():
    environment = Environment(show("3"), show("4"), done(1.0))
    _, asked = play([[5], [6], [7]], environment, context=memory_context(longest=5))
    assert asked[2][0] == [1, 2, 6, 4]  # 1 2 5 3 6 4 would be six


@pytest.mark.parametrize("truncation", ["error", "drop"])
def test_a_prompt_that_grows_too_long_is_a_limit(truncation):
    environment = Environment(show("3"), show("4 4 4"))  # 1 2 6 4 4 4 is longer than 5, whatever is forgotten
    trajectory, asked = play([[5], [6]], environment, context=memory_context(longest=5, truncation=truncation))
    assert trajectory.end is EpisodeEnd.TOKEN_LIMIT and environment.closed
    assert trajectory.score.outcome is Outcome.SCORED and trajectory.score.reward == 0
    assert all(fact in trajectory.score.reason for fact in ("6 tokens", "data.max_prompt_length=5"))
    assert [seen for seen, _ in asked] == [[1, 2], [1, 2, 5, 3]]  # no second attempt: it would be the same
    assert [row.token_ids for row in trajectory.rows] == [[1, 2, 5], [1, 2, 5, 3, 6]]


def test_a_first_prompt_that_is_too_long_is_a_failure():
    trajectory, asked = play([], Environment(), context=memory_context(longest=1))
    assert trajectory.end is EpisodeEnd.PROMPT_LIMIT and asked == []
    assert trajectory.score.outcome is Outcome.ENVIRONMENT_FAILED


class Recalling(Environment):
    """Environment that writes its own prompts: with `recalled`, or else 8 and the actions."""

    recalled: object = ...

    def recall(self, steps: list[Step]) -> object:
        own = [Message(role="user", content=" ".join(["8", *(step.action for step in steps)]))]
        return own if self.recalled is ... else self.say(self.recalled)


def test_environment_may_write_its_own_prompt():
    _, asked = play([[5], [6]], Recalling(show("3"), done(1.0)), context=memory_context())
    assert asked[1][0] == [8, 5]


def test_system_prompt_precedes_what_an_environment_shows():
    said = [Message(role="system", content="9"), Message(role="user", content="1 2")]
    replies = ["1 2", Observation(said[1:]), Observation(said)]
    assert [check_reset_reply(reply, "9") for reply in replies] == [said, said, said]
    assert [check_reset_reply(reply) for reply in replies] == ["1 2", said[1:], said]
    prompts = token_context.PromptRenderer(encode, 100, "error")
    memory = token_context.MemoryContext(Recalling(), prompts, lambda content: (), 2, "simple", "9")
    memory.start_episode(said)
    memory.add_turn_and_get_context([5], Step("5", []))
    assert memory.prompt_ids == [9, 8, 5]


@pytest.mark.parametrize(
    "recalled",
    [
        KeyError("board"),
        None,
        [],
        [{"role": "user", "content": 7}],
    ],
)
def test_a_recall_that_raises_or_has_a_wrong_type_is_an_environment_failure(monkeypatch, recalled):
    monkeypatch.setattr(Recalling, "recalled", recalled)
    trajectory, _ = play([[5], [5]], Recalling(show("3")), Recalling(show("3")), context=memory_context())
    assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED and trajectory.score.reason.startswith("recall: ")
    assert not isinstance(recalled, KeyError) or "KeyError: 'board' (attempt 2 of 2)" in trajectory.score.reason


def test_rows_must_equal_the_engine_prompts():
    turns = [make_turn([2, 3], [1]), make_turn([5], [4])]
    rows, fresh = token_context.build_append_context_rows(turns), token_context.build_memory_context_rows(turns)
    token_context.check_rows_match_turns(rows, turns, [[1], [1, 2, 3, 4]], [(), ()])
    token_context.check_rows_match_turns(fresh, turns, [[1], [4]], [(), ()])
    with pytest.raises(AssertionError, match="differ from the engine's prompt"):
        token_context.check_rows_match_turns(rows, turns, [[1], [1, 2, 4]], [(), ()])
    rows[0].action_mask[0] = 1
    with pytest.raises(AssertionError, match="does not cover exactly the sampled"):
        token_context.check_rows_match_turns(rows, turns, [[1], [1, 2, 3, 4]], [(), ()])
    fresh[1].token_ids[-1] = 9
    with pytest.raises(AssertionError, match="differs from the sampled tokens"):
        token_context.check_rows_match_turns(fresh, turns, [[1], [4]], [(), ()])


def routed(context_ids: list[int], actions: int, tokens: int, cut: int = 0) -> Turn:
    """A turn with expert ids equal to positions, one layer and one expert per token."""
    experts = np.arange(tokens, dtype=np.uint8).reshape(-1, 1, 1)
    return make_turn(make_completion([5] * (actions - cut), columns={"routed_experts": experts}), context_ids)


def test_experts_of_a_row_come_from_the_turn_that_computed_them():
    """Two prompt tokens, an action of three cut to two, three tokens of the environment, an action of two."""
    first, second = routed([1, 2], 3, 2 + 3 - 1, cut=1), routed([7, 8, 9], 2, 7 + 2 - 1)
    second.completion.columns["routed_experts"][:] += 100
    (row,) = token_context.build_append_context_rows([first, second])
    assert row.turn_ends == [3, 8]
    # Position 3, the last that is left of the first action, was computed in the second turn; position 8 never.
    assert row.columns["routed_experts"].ravel().tolist() == [0, 1, 2, 103, 104, 105, 106, 107, 107]
    one, other = token_context.build_memory_context_rows([first, replace(second, context_ids=[1, 2, 7, 8, 9, 9, 9])])
    assert one.columns["routed_experts"].ravel().tolist() == [0, 1, 2, 2]
    assert other.columns["routed_experts"].ravel().tolist() == [*range(100, 108), 107]
    second.completion = replace(second.completion, columns={})
    assert token_context.build_append_context_rows([first, second])[0].columns == {}


# Rendered prompts. Tokens are letters.


def letters(content: str) -> list[int]:
    return [ord(letter) for letter in content]


@pytest.mark.parametrize(("limit", "truncation", "kept"), [(3, "error", "abc"), (2, "left", "bc"), (2, "right", "ab")])
def test_only_a_prompt_over_the_limit_is_truncated(limit, truncation, kept):
    assert token_context.PromptRenderer(letters, limit, truncation)("abc") == letters(kept)


@pytest.mark.parametrize("truncation", ["error", "drop"])
def test_too_long_prompt_is_an_environment_failure(truncation):
    with pytest.raises(token_context.PromptTooLong, match=r"3 tokens.*data\.max_prompt_length=2"):
        token_context.PromptRenderer(letters, 2, truncation)("abc")
    assert not token_context.PromptRenderer(letters, 2, truncation).is_within_limit("abc")


def test_template_error_is_an_environment_failure():
    def reject(content):
        raise ValueError("the chat template rejects a chat with the roles ['tool']")

    with pytest.raises(EnvironmentFailure, match=r"ValueError: .*\['tool'\]"):
        token_context.PromptRenderer(reject, 2, "left")([{"role": "tool", "content": "a"}])


def test_samples_of_a_prompt_are_rendered_once_and_do_not_share_a_list(monkeypatch):
    monkeypatch.setattr(token_context, "CACHE_SIZE", 2)
    rendered = []
    renderer = token_context.PromptRenderer(lambda content: rendered.append(content) or letters(content), 10, "error")
    first, second = renderer("ab"), renderer("ab")
    assert rendered == ["ab"] and first == second and first is not second
    for content in ("b", "c", "ab"):  # the oldest of three is forgotten
        renderer(content)
    assert rendered == ["ab", "b", "c", "ab"]


def test_kept_tokens_are_those_of_each_turns_new_tokens() -> None:
    """The second turn's prompt ends with the first turn's tokens, of which one was cut off."""
    first = KeptTokens.of_completion([[5], [5, 6], [7]], 2)
    second = KeptTokens.of_completion([[8, 9]], 5)
    turns = [
        make_turn(make_completion([5, 6], columns={KEPT_TOKENS: first}), [1, 2]),
        make_turn(make_completion([9], columns={KEPT_TOKENS: second}), [3]),
    ]
    kept = KeptTokens.decode(build_row(turns).columns[KEPT_TOKENS])
    assert kept.sizes.tolist() == [0, 1, 2, 0, 2, 2] and kept.ids.tolist() == [5, 5, 6, 8, 9, 8, 9]
