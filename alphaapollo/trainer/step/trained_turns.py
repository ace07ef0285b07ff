"""The order of an episode's turns in time, for rewards, credit and random choices. Rows have no order of their own."""

from __future__ import annotations

from typing import NamedTuple

from alphaapollo.types import Trajectory, Turn


class TrainedTurn(NamedTuple):
    """Turn that is trained on, and its action tokens: token_ids[start:end] of a row."""

    turn: Turn
    row: int  # index in Trajectory.rows
    start: int
    end: int


def list_trained_turns(trajectory: Trajectory) -> list[TrainedTurn]:
    """Return the turns of the rows, in the order in which the model sampled them."""
    found = []
    for number, row in enumerate(trajectory.rows):
        turns = trajectory.turns[row.first_turn : row.first_turn + len(row.turn_ends)]
        for turn, last in zip(turns, row.turn_ends, strict=True):
            found.append(TrainedTurn(turn, number, last + 1 - len(turn.completion.token_ids), last + 1))
    return sorted(found, key=lambda one: one.turn.answer_number)
