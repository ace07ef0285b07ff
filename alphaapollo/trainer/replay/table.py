"""Comparison of a recorded iteration with its replay."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from alphaapollo.trainer.replay.recording import LearningOutcome
from alphaapollo.trainer.replay.run import PreparedReplay

NOT_COMPARED = ("perf/mfu/actor", "actor/sharing_gap", "critic/sharing_gap")  # of the clock; of a worker's first batch
LAYOUT = ("batch/sharing", "batch/micro_batches", "batch/padding", "batch/rank_imbalance", "batch/rows_skipped")
FLOOR = 1e-2  # differences of smaller metrics, possibly sums that cancel, are in units of this
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # where the bits may differ

Value = float | np.ndarray | tuple[str, float]
"""A metric, a column, or digest and norm of weights."""


@dataclass(frozen=True)
class ComparedValue:
    """A metric, or the norm of a column or of weights, on both sides."""

    name: str
    recorded: float | None  # None: missing
    replayed: float | None
    same: bool  # to the last bit
    difference: float  # relative


def compare(recorded: LearningOutcome, replayed: LearningOutcome, exact: bool) -> list[ComparedValue]:
    """Compare all values in the order in which they are computed; with `exact` also those of the memory layout."""
    excluded, values = {*NOT_COMPARED, *(() if exact else LAYOUT)}, []
    for part in ("columns", "figures", "fingerprints"):
        ours, theirs = getattr(recorded, part), getattr(replayed, part)
        for name in ours | theirs:
            if name not in excluded:
                values.append(_compare(name, ours.get(name), theirs.get(name)))
    return values


def print_comparison(prepared: PreparedReplay, replayed: LearningOutcome) -> bool:
    """Print both sides and the verdict; returns False if they should be equal but are not."""
    recording, recorded = prepared.recording, prepared.recording.outcome
    print(f"iteration {recording.info.step}, recorded in {recording.folder}")
    if recorded is None:
        recorded = LearningOutcome({}, {}, {}, "the run ended before there was an outcome")
    if recorded.error or replayed.error:
        return _print_errors(prepared, recorded, replayed)
    values = compare(recorded, replayed, prepared.exact)
    print(f"{'':34}{'recorded':>15}{'replayed':>15}  relative difference")
    for value in values:
        difference = "0" if value.same else f"{value.difference:.1e}"
        print(f"{value.name:34}{_format(value.recorded):>15}{_format(value.replayed):>15}  {difference}")
    equal, verdict = judge(prepared, values)
    print(verdict)
    return equal


def judge(prepared: PreparedReplay, values: list[ComparedValue]) -> tuple[bool, str]:
    """Whether the replay is as expected, and a sentence that says so."""
    differing = [value for value in values if not value.same]
    largest = max(differing, key=lambda value: value.difference, default=None)
    if largest is None:
        return True, f"bit for bit equal: {len(values)} of {len(values)}"
    how = f"the largest difference is {largest.difference:.1e}, in {largest.name}"
    if prepared.float64 or prepared.changes:
        words = ["in float64"] * prepared.float64 + [f"with {word}" for word in prepared.changes]
        return True, f"{', '.join(words)}: {how}"
    if prepared.exact:
        return False, f"not equal: the first difference is in {differing[0].name}; {how}"
    tolerance = TOLERANCE[prepared.plan.model.dtype]
    equal = largest.difference <= tolerance
    verdict = f"{'equal' if equal else 'not equal'} within {tolerance:g}: {how}"
    return equal, f"{verdict}. Not bit for bit, because {'; '.join(prepared.reasons)}"


def _print_errors(prepared: PreparedReplay, recorded: LearningOutcome, replayed: LearningOutcome) -> bool:
    print(f"recorded: {recorded.error or 'a complete step'}")
    print(f"replayed: {replayed.error or 'a complete step'}")
    for value in compare(replayed, replayed, exact=False):
        print(f"{value.name:34}{'':15}{_format(value.replayed):>15}")
    if recorded.error and replayed.error:  # the recorded one may begin with the worker's name
        return replayed.error in recorded.error
    expects_change = prepared.float64 or bool(prepared.changes) or prepared.recording.outcome is None
    return expects_change and not replayed.error


def _compare(name: str, recorded: Value | None, replayed: Value | None) -> ComparedValue:
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
    return ComparedValue(
        name, _norm(recorded), _norm(replayed), same, math.inf if math.isnan(difference) else difference
    )


def _norm(value: Value | None) -> float | None:
    if isinstance(value, np.ndarray):
        return float(np.linalg.norm(value.astype(np.float64)))
    return value[1] if isinstance(value, tuple) else value


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
