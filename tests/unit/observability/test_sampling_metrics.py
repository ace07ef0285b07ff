"""Which rows of rollout groups are compared with the policy's distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alphaapollo.algorithms.surprise import compute_z
from alphaapollo.observability.sampling_metrics import compare_samples, draw_rows, list_free_rows
from alphaapollo.types import Row, TrajectoryGroup
from tests.unit.trainer.samples import group, trajectory


def sample(ids: list[int], context: int = 7, **values: Any) -> Row:
    logp = [0.0] + [-1.0] * len(ids)
    row = Row([context, *ids], [0] + [1] * len(ids), logp, [len(ids)], weight_versions=[(2, len(ids))])
    return replace(row, **values)


def group_of(*rows: Row) -> TrajectoryGroup:
    return group(*(replace(trajectory(number, 1.0, 1), rows=[row]) for number, row in enumerate(rows)))


def test_rows_of_other_distributions_are_left_out() -> None:
    rows = (
        sample([1]),
        sample([2], temperature=0.0),
        sample([3], weight_versions=[(1, 1)]),
        sample([4], temperature=0.5),
    )
    found = group_of(*rows)
    assert [one[0].token_ids[1] for one in list_free_rows(found, 2, 0.5)] == [1, 4]
    found.trajectories[0].turns[0].info["constrained"] = True
    assert [one[0].token_ids[1] for one in list_free_rows(found, 2, 0.5)] == [4]


def test_rows_are_drawn_until_the_limit_is_exceeded() -> None:
    free = [[[sample([1] * 9)] for _ in range(5)]]
    assert [len(draw_rows(free, 0, limit)) for limit in (1, 10, 11, 1000)] == [1, 1, 2, 5]
    assert draw_rows([[]], 0) == []


def test_equal_samples_of_a_prompt_count() -> None:
    equal, other = [[sample([1, 2, 3, 4])]] * 12, [[sample([number, 2, 3, 4])] for number in range(12)]
    assert compute_z(compare_samples(equal)) > 5 and abs(compute_z(compare_samples(other))) < 3
    prompts = [[sample([1, 2, 3, 4], context)] for context in range(12)]
    assert compute_z(compare_samples(prompts)) == 0, "other prompts"
