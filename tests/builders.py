"""Small completions, turns, trajectories and groups, and files of rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alphaapollo.rollout.token_context import build_append_context_rows, build_memory_context_rows
from alphaapollo.types import (
    Completion,
    EpisodeEnd,
    Prompt,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def make_completion(
    tokens: int | Sequence[int],
    logprobs: float | Sequence[float] = -0.5,
    version: int = 0,
    stop_reason: StopReason = StopReason.STOP,
    **fields: Any,
) -> Completion:
    """Completion of these tokens, or of the tokens 0, 1, 2, ... if `tokens` is their number."""
    tokens = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    logprobs = [logprobs] * len(tokens) if isinstance(logprobs, float) else list(logprobs)
    return Completion(tokens, logprobs, stop_reason, version, **fields)


def make_turn(
    tokens: int | Sequence[int] | Completion, context: Sequence[int] = (7, 8), text: str = "text", **fields: Any
) -> Turn:
    """Turn with a completion of `tokens` after the tokens `context`."""
    completion = tokens if isinstance(tokens, Completion) else make_completion(tokens)
    return Turn(list(context), completion, text, **fields)


def make_trajectory(
    *turns: Turn | int | Sequence[int],
    score: Score | float = 1.0,
    sample: int = 0,
    prompt_id: int = 0,
    memory: bool = False,
    end: EpisodeEnd = EpisodeEnd.DONE,
    **fields: Any,
) -> Trajectory:
    """Trajectory of turns (or their tokens) and its rows. A number as `score` is also the accuracy.

    memory: each turn has a new prompt, and a row of its own.
    """
    made = [turn if isinstance(turn, Turn) else make_turn(turn) for turn in turns]
    rows = build_memory_context_rows(made) if memory else build_append_context_rows(made)
    score = score if isinstance(score, Score) else Score(score, {"accuracy": score})
    return Trajectory(prompt_id, sample, made, rows, score, end, **fields)


def make_group(
    *trajectories: Trajectory, prompt: Prompt | None = None, baseline: Trajectory | None = None, **extra_info: Any
) -> TrajectoryGroup:
    """Group of trajectories. `extra_info` belongs to a prompt made here; otherwise pass `prompt`."""
    prompt = prompt or Prompt(trajectories[0].prompt_id, "test", "text", extra_info=extra_info)
    return TrajectoryGroup(prompt, list(trajectories), baseline)


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """Write rows to a Parquet file, or to a file of JSON lines. Returns its path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)
