"""What is trained on is what the engine saw: the rows of a trajectory, compared token by token."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.types import Row, Turn


def check_rows(rows: Sequence[Row], turns: Sequence[Turn], seen: Sequence[list[int]]) -> None:
    """Our own invariant, for any context: what stands before an action in its row is what the engine saw, and the mask
    covers exactly what the model sampled. `seen`: one a turn."""
    for row in rows:
        own = turns[row.first_turn : row.first_turn + len(row.turn_ends)]
        spans = []
        for turn, before, end in zip(own, seen[row.first_turn :], row.turn_ends, strict=False):
            start = end + 1 - len(turn.completion.token_ids)
            assert row.token_ids[:start] == before, "a row's tokens before an action are not what the engine saw"
            assert row.token_ids[start : end + 1] == turn.completion.token_ids, "a row's action is not the sampled one"
            spans.append((start, end + 1))
        assert sum(row.action_mask) == sum(end - start for start, end in spans), "the mask covers more than actions"
        assert all(all(row.action_mask[start:end]) for start, end in spans), "the mask misses an action"
        assert len(row.weight_versions) == sum(row.action_mask), "a sampled token has no version of the weights"
