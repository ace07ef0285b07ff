"""Check that training rows equal what the engine was given and sampled, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.types import Row, Turn


def check_rows(rows: Sequence[Row], turns: Sequence[Turn], engine_prompts: Sequence[list[int]]) -> None:
    """Assert that the tokens before each action are the engine's prompt and that the mask covers exactly the sampled
    tokens.

    engine_prompts: prompt ids given to the engine, one list per turn.
    """
    for row in rows:
        own = turns[row.first_turn : row.first_turn + len(row.turn_ends)]
        spans = []
        for turn, before, end in zip(own, engine_prompts[row.first_turn :], row.turn_ends, strict=False):
            start = end + 1 - len(turn.completion.token_ids)
            assert row.token_ids[:start] == before, "a row's tokens before an action differ from the engine's prompt"
            assert row.token_ids[start : end + 1] == turn.completion.token_ids, (
                "a row's action differs from the sampled tokens"
            )
            spans.append((start, end + 1))
        assert sum(row.action_mask) == sum(end - start for start, end in spans), "the mask covers more than actions"
        assert all(all(row.action_mask[start:end]) for start, end in spans), "the mask misses an action"
        assert len(row.weight_versions) == sum(row.action_mask), "a sampled token has no weight version"
