"""Compare the recorded and the replayed result of an iteration, and print them as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from alphaapollo.trainer.replay.recording import LearningOutcome
from alphaapollo.trainer.replay.run import PreparedReplay

NOT_COMPARED = ("perf/mfu/actor", "actor/sharing_gap", "critic/sharing_gap")  # measured times; first batch only
LAYOUT = ("batch/sharing", "batch/micro_batches", "batch/padding", "batch/rank_imbalance", "batch/rows_skipped")
FLOOR = 1e-2  # smallest scale of relative differences: metrics near 0 may be sums that cancel
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # largest relative difference where rounding may differ, by dtype

Value = float | np.ndarray | tuple[str, float]
"""Metric, column, or (digest, norm) of weights."""


@dataclass(frozen=True)
class ComparedValue:
    """Comparison of a recorded and a replayed number: a metric, or the norm of per-token values or of weights."""

    name: str
    recorded: float | None  # None if missing
    replayed: float | None  # None if missing
    is_equal: bool  # bitwise
    difference: float  # relative difference


def compare_outcomes(
    recorded: LearningOutcome, replayed: LearningOutcome, compare_batching: bool
) -> list[ComparedValue]:
    """Compare all values of two results, in the order of their computation. With `compare_batching`, also compare the
    metrics of micro-batches and padding, which depend on the number of ranks."""
    excluded, values = {*NOT_COMPARED, *(() if compare_batching else LAYOUT)}, []
    for part in ("columns", "metrics", "fingerprints"):
        left, right = getattr(recorded, part), getattr(replayed, part)
        names = [name for name in left | right if name not in excluded]
        values.extend([_compare_value(name, left.get(name), right.get(name)) for name in names])
    return values


def print_and_check_comparison(prepared: PreparedReplay, replayed: LearningOutcome) -> bool:
    """Print recorded and replayed values side by side. Returns False if they differ but should be equal."""
    recording, recorded = prepared.recording, prepared.recording.outcome
    print(f"iteration {recording.info.step}, recorded in {recording.folder}")
    if recorded is None:
        recorded = LearningOutcome({}, {}, {}, "the run ended before there was an outcome")
    if recorded.error or replayed.error:
        return _check_update_errors(prepared, recorded, replayed)
    values = compare_outcomes(recorded, replayed, prepared.expects_exact_result)
    print(f"{'':34}{'recorded':>15}{'replayed':>15}  relative difference")
    for value in values:
        difference = "0" if value.is_equal else f"{value.difference:.1e}"
        print(f"{value.name:34}{_format_number(value.recorded):>15}{_format_number(value.replayed):>15}  {difference}")
    equal, verdict = judge_replay(prepared, values)
    print(verdict)
    return equal


def judge_replay(prepared: PreparedReplay, values: list[ComparedValue]) -> tuple[bool, str]:
    """Return whether the replayed values are as expected, and a sentence that describes the largest difference."""
    differing = [value for value in values if not value.is_equal]
    largest = max(differing, key=lambda value: value.difference, default=None)
    if largest is None:
        return True, f"bit for bit equal: {len(values)} of {len(values)}"
    largest_difference = f"the largest difference is {largest.difference:.1e}, in {largest.name}"
    if prepared.float64 or prepared.result_changing_overrides:
        words = ["in float64"] * prepared.float64 + [f"with {word}" for word in prepared.result_changing_overrides]
        return True, f"{', '.join(words)}: {largest_difference}"
    if prepared.expects_exact_result:
        return False, f"not equal: the first difference is in {differing[0].name}; {largest_difference}"
    tolerance = TOLERANCE[prepared.plan.model.dtype]
    equal = largest.difference <= tolerance
    verdict = f"{'equal' if equal else 'not equal'} within {tolerance:g}: {largest_difference}"
    return equal, f"{verdict}. Not bit for bit, because {'; '.join(prepared.rounding_difference_causes)}"


def _check_update_errors(prepared: PreparedReplay, recorded: LearningOutcome, replayed: LearningOutcome) -> bool:
    """Print the error with which each update ended, if any. Returns True if both ended with the same error, or if only
    the recorded one failed and the replay has other settings, e.g. float64."""
    print(f"recorded: {recorded.error or 'a complete step'}")
    print(f"replayed: {replayed.error or 'a complete step'}")
    for value in compare_outcomes(replayed, replayed, compare_batching=False):
        print(f"{value.name:34}{'':15}{_format_number(value.replayed):>15}")
    if recorded.error and replayed.error:  # the recorded error may begin with the worker's name
        return replayed.error in recorded.error
    expects_change = prepared.float64 or bool(prepared.result_changing_overrides) or prepared.recording.outcome is None
    return expects_change and not replayed.error


def _compare_value(name: str, recorded: Value | None, replayed: Value | None) -> ComparedValue:
    same, gap, scale = False, math.inf, 1.0
    if isinstance(recorded, np.ndarray) and isinstance(replayed, np.ndarray) and recorded.shape == replayed.shape:
        same = recorded.dtype == replayed.dtype and recorded.tobytes() == replayed.tobytes()
        gap = float(np.abs(recorded.astype(np.float64) - replayed).max(initial=0.0))
        scale = float(np.abs(recorded).max(initial=0.0))
    elif isinstance(recorded, tuple) and isinstance(replayed, tuple):
        same = recorded[0] == replayed[0]
        gap, scale = abs(recorded[1] - replayed[1]), max(recorded[1], replayed[1])
    elif isinstance(recorded, float | int) and isinstance(replayed, float | int):
        same = recorded == replayed or (math.isnan(recorded) and math.isnan(replayed))
        gap = abs(recorded - replayed)
        scale = max(abs(recorded), abs(replayed), 0.0 if "norm" in name else FLOOR)
    difference = 0.0 if same else gap / (scale or 1.0)
    difference = math.inf if math.isnan(difference) else difference
    return ComparedValue(name, _get_value_or_norm(recorded), _get_value_or_norm(replayed), same, difference)


def _get_value_or_norm(value: Value | None) -> float | None:
    if isinstance(value, np.ndarray):
        return float(np.linalg.norm(value.astype(np.float64)))
    return value[1] if isinstance(value, tuple) else value


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
