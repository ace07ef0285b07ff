"""Rows of rollout groups whose tokens should be samples of the policy's own distributions (algorithms/surprise.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alphaapollo.algorithms.surprise import sum_repetitions
from alphaapollo.types import Row, TrajectoryGroup

TOKEN_DIVISOR = 64  # an iteration measures a 64th of its tokens, prompts included, so that this takes little time
MIN_TOKENS, MAX_TOKENS = 128, 8192  # limits of the number of measured tokens


def list_free_rows(group: TrajectoryGroup, version: int, temperature: float) -> list[list[Row]]:
    """Return the rows of each trajectory that only weights of `version` sampled, at `temperature` and unconstrained."""
    return [
        trajectory.rows
        for trajectory in group.trajectories
        if trajectory.rows
        and not any("constrained" in turn.info for turn in trajectory.turns)
        and all(row.temperature in (None, temperature) for row in trajectory.rows)
        and all(sampled_by == version for row in trajectory.rows for sampled_by, _ in row.weight_versions)
    ]


def draw_rows(groups: Sequence[list[list[Row]]], seed: int, max_tokens: int | None = None) -> list[Row]:
    """Draw rows until they have max_tokens, regardless of their content. None: all tokens / TOKEN_DIVISOR."""
    rows = [row for group in groups for trajectory in group for row in trajectory]
    drawn = [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]
    lengths = [len(row.token_ids) for row in drawn]
    if max_tokens is None:
        max_tokens = min(max(MIN_TOKENS, sum(lengths) // TOKEN_DIVISOR), MAX_TOKENS)
    count = int(np.searchsorted(np.cumsum(lengths), max_tokens))
    return drawn[: count + 1]  # includes the row that exceeds max_tokens, which may be long


def compare_samples(group: Sequence[list[Row]]) -> np.ndarray:
    """Return the sums of repetitions among those first turns of a group whose prompt is the first sample's prompt."""
    starts = [(row, row.response_start, row.turn_ends[0] + 1) for row, *_ in group]
    prompts = [list(row.token_ids[:start]) for row, start, _ in starts]
    turns = [(row.token_ids[start:end], row.logprobs[start:end]) for row, start, end in starts]
    return sum_repetitions([turn for turn, prompt in zip(turns, prompts, strict=True) if prompt == prompts[0]])
