"""What a run recorded of an iteration beside what a replay has computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from alphaapollo.trainer.replay.recording import Outcome
from alphaapollo.trainer.replay.run import Prepared

OF_THE_CLOCK = ("actor/mfu",)
ONCE = ("actor/sharing_gap", "critic/sharing_gap")  # of a worker's first batch
OF_THE_LAYOUT = ("batch/sharing", "batch/micro_batches", "batch/padding", "batch/rank_imbalance", "batch/rows_skipped")
FLOOR = 1e-2  # a figure below it may be a sum that cancels: its difference is absolute, in units of this
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # where the bits may differ


@dataclass(frozen=True)
class Line:
    """One thing that came out; of a column and of weights the norm stands for it."""

    name: str
    recorded: float | None  # None: it was not there
    replayed: float | None
    same: bool  # to the last bit
    difference: float  # relative


def compare(recorded: Outcome, replayed: Outcome, exact: bool) -> list[Line]:
    """In the order in which they are made. exact: also what depends on the layout in memory."""
    passed_over = {*OF_THE_CLOCK, *ONCE, *([] if exact else OF_THE_LAYOUT)}
    figures = [name for name in {**recorded.figures, **replayed.figures} if name not in passed_over]
    return [
        *(
            _column(name, recorded.columns.get(name), replayed.columns.get(name))
            for name in {**recorded.columns, **replayed.columns}
        ),
        *(_figure(name, recorded.figures.get(name), replayed.figures.get(name)) for name in figures),
        *(
            _fingerprint(name, recorded.fingerprints.get(name), replayed.fingerprints.get(name))
            for name in {**recorded.fingerprints, **replayed.fingerprints}
        ),
    ]


def print_comparison(prepared: Prepared, replayed: Outcome) -> bool:
    """Print both and the verdict; False: they should be equal and are not."""
    about, recorded = prepared.recording.about, prepared.recording.outcome
    print(f"iteration {about.step}, recorded in {prepared.recording.folder}")
    if recorded is None:
        recorded = Outcome({}, {}, {}, "the run ended before there was an outcome")
    if recorded.error or replayed.error:
        return _print_errors(prepared, recorded, replayed)
    lines = compare(recorded, replayed, prepared.exact)
    print(f"{'':34}{'recorded':>15}{'replayed':>15}  relative difference")
    for line in lines:
        print(f"{line.name:34}{_number(line.recorded):>15}{_number(line.replayed):>15}  {_difference(line)}")
    equal, verdict = judge(prepared, lines)
    print(verdict)
    return equal


def judge(prepared: Prepared, lines: list[Line]) -> tuple[bool, str]:
    """Is it as it should be, and a sentence that says so."""
    differing = [line for line in lines if not line.same]
    largest = max(differing, key=lambda line: line.difference, default=None)
    if largest is None:
        return True, f"bit for bit equal: {len(lines)} of {len(lines)}"
    how = f"the largest difference is {largest.difference:.1e}, in {largest.name}"
    if prepared.float64 or prepared.changes:
        words = ["in float64"] * prepared.float64 + [f"with {word}" for word in prepared.changes]
        return True, f"{', '.join(words)}: {how}"
    first = f"the first that differs is {differing[0].name}"
    if prepared.exact:
        return False, f"not equal: {first}; {how}"
    tolerance = TOLERANCE[prepared.plan.model.dtype]
    equal = largest.difference <= tolerance
    said = f"{'equal' if equal else 'not equal'} within {tolerance:g}: {how}"
    return equal, f"{said}. Not bit for bit, for {'; '.join(prepared.reasons)}"


def _print_errors(prepared: Prepared, recorded: Outcome, replayed: Outcome) -> bool:
    print(f"recorded: {recorded.error or 'a whole step'}")
    print(f"replayed: {replayed.error or 'a whole step'}")
    for line in compare(replayed, replayed, exact=False):
        print(f"{line.name:34}{'':15}{_number(line.replayed):>15}")
    if recorded.error and replayed.error:  # the worker's name may stand before it
        return replayed.error in recorded.error
    asked_for_another = prepared.float64 or bool(prepared.changes) or prepared.recording.outcome is None
    return asked_for_another and not replayed.error


def _column(name: str, recorded: np.ndarray | None, replayed: np.ndarray | None) -> Line:
    if recorded is None or replayed is None or recorded.shape != replayed.shape:
        return Line(name, _norm(recorded), _norm(replayed), False, math.inf)
    same = recorded.dtype == replayed.dtype and recorded.tobytes() == replayed.tobytes()
    scale = float(np.abs(recorded).max(initial=0.0)) or 1.0
    gap = float(np.abs(recorded.astype(np.float64) - replayed).max(initial=0.0)) / scale
    return Line(name, _norm(recorded), _norm(replayed), same, 0.0 if same else _number_or_inf(gap))


def _figure(name: str, recorded: float | None, replayed: float | None) -> Line:
    same = recorded == replayed or (_is_nan(recorded) and _is_nan(replayed))
    if same or recorded is None or replayed is None:
        return Line(name, recorded, replayed, same, 0.0 if same else math.inf)
    scale = max(abs(recorded), abs(replayed), 0.0 if "norm" in name else FLOOR)
    return Line(name, recorded, replayed, False, _number_or_inf(abs(recorded - replayed) / scale))


def _fingerprint(name: str, recorded: tuple[str, float] | None, replayed: tuple[str, float] | None) -> Line:
    if recorded is None or replayed is None:
        return Line(name, recorded and recorded[1], replayed and replayed[1], False, math.inf)
    same = recorded[0] == replayed[0]
    scale = max(recorded[1], replayed[1]) or 1.0
    gap = _number_or_inf(abs(recorded[1] - replayed[1]) / scale)
    return Line(name, recorded[1], replayed[1], same, 0.0 if same else gap)


def _norm(column: np.ndarray | None) -> float | None:
    return None if column is None else float(np.linalg.norm(column.astype(np.float64)))


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def _number_or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"


def _difference(line: Line) -> str:
    return "0" if line.same else f"{line.difference:.1e}"
