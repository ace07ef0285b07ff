"""Check that results do not depend on the layout of trajectories: `python -m tests.invariance.check --seed 7`.

Each case draws episodes (several turns, step rewards, failures, truncation, invalid actions; groups that are partial,
have one sample, or equal rewards). For eight pairs of estimator and loss, the real code computes gradients from the
trajectories, once in the plain layout and once per view: append or memory context, packed or padded, one to three
ranks, any micro-batch budget, another order, rebuilt before each step, without rows of zero advantage. A small
differentiable table replaces the model, and ranks are simulated one after the other. tests/unit/workers/test_layouts.py
has layouts of real workers.

As many cases have images (images.py): the model is compared with plain transformers, row by row.

The last line is a JSON object; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema.algorithm import OverlongPenalty
from tests.invariance.case import BASE, Case, Name
from tests.invariance.episodes import MAX_LENGTH
from tests.invariance.images import check_images
from tests.invariance.settings import pairs
from tests.invariance.table import Outcome
from tests.invariance.views import View

PAIRS_PER_CASE = 8
QUICK_IMAGE_CASES = 6
TOLERANCES = {
    "": 1e-4,  # columns are sent to the workers in float32, and a gradient is a difference of large terms
    "_with_images": 1e-5,  # nats; gradients relative to the largest entry
}


@dataclass
class Report:
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOLERANCES, 0.0))
    comparisons: int = 0
    pairs: set[tuple[str, str]] = field(default_factory=set)

    def note(self, where: str, difference: float, kind: str = "") -> None:
        """Count a difference, which is relative to the largest entry of each array."""
        self.comparisons += 1
        self.largest[kind] = max(self.largest[kind], difference)
        if not difference <= TOLERANCES[kind]:
            self.failures.append(f"{where}: differs by {difference:.2g}")

    def summary(self) -> str:
        largest = {f"largest_difference{kind}": value for kind, value in self.largest.items()}
        counts = {"comparisons": self.comparisons, "pairs": len(self.pairs)}
        return json.dumps({"cases": self.cases, "failures": len(self.failures)} | largest | counts)


def names_of(seed: int, cases: int) -> Iterator[list[Name]]:
    """Pairs of each case in turn. len(pairs()) / PAIRS_PER_CASE cases, rounded up, contain all pairs."""
    every = pairs()
    for number in range(cases):
        chosen = [every[(number * PAIRS_PER_CASE + i) % len(every)] for i in range(PAIRS_PER_CASE)]
        yield [Name(seed, number, *pair) for pair in chosen]


def check(seed: int, cases: int, progress: bool = False, quick: bool = False) -> Report:
    """`quick`: one view per pair, and few cases with images."""
    torch.set_num_threads(1)
    report = Report()
    for names in names_of(seed, cases):
        for turn, name in enumerate(names):
            check_case(name, report, turn if quick else None)
        report.cases += 1
        if progress and report.cases % 20 == 0:
            print(f"{report.cases} of {cases} cases, {len(report.failures)} failures", flush=True)
    for where, gap in check_images(seed, QUICK_IMAGE_CASES if quick else cases):
        report.note(where, gap, "_with_images")
    return report


def check_case(name: Name, report: Report, turn: int | None) -> None:
    case = Case.draw(name)
    expected = case.outcome(BASE)
    report.pairs.add((name.estimator, name.loss))
    for view in case.views if turn is None else [case.views[turn % len(case.views)]]:
        report.note(f"{name}: {view.name}", difference(case.outcome(view), expected, with_metrics=not view.skips))


def check_sessions(seed: int, sessions: int) -> Report:
    """Check that agents' sessions of several rows give the same results as episodes with one row."""
    report, every = Report(), pairs()
    for number in range(sessions):
        name = Name(seed, number, *every[number % len(every)])
        case = Case.draw(name)
        if number % 2 and not get_estimator(case.estimator).no_shaping_reason:
            penalty = OverlongPenalty(enable=True, cache=MAX_LENGTH - 10)
            case = replace(case, config=replace_value(case.config, "algorithm.overlong_penalty", penalty))
        report.pairs.add((name.estimator, name.loss))
        view = View("session", "session", num_ranks=1 + number % 2)
        report.note(f"{name}: session", difference(case.outcome(view), case.outcome(BASE)))
    return report


def difference(ours: Outcome, expected: Outcome, with_metrics: bool = True) -> float:
    """Largest difference of advantages, returns, losses, gradients and metrics, each relative to its largest entry."""
    assert ours.metrics.keys() == expected.metrics.keys()
    compared = [(ours.advantages, expected.advantages, 1.0), (ours.returns, expected.returns, 1.0)]
    if with_metrics:
        compared += [([*ours.metrics.values()], [expected.metrics[name] for name in ours.metrics], 1.0)]
    compared += [(ours.losses, expected.losses, 1e-2)]
    for name in ("gradients", "value_gradients"):
        compared += [
            (one, other, 1e-2) for one, other in zip(getattr(ours, name), getattr(expected, name), strict=True)
        ]
    return max(_relative(np.asarray(one), np.asarray(other), floor) for one, other, floor in compared)


def _relative(ours: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """NaN counts as an infinite difference."""
    assert ours.shape == expected.shape
    gap = np.abs(ours - expected).max(initial=0.0) / max(np.abs(expected).max(initial=0.0), floor)
    return float(gap) if np.isfinite(gap) else float("inf")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.invariance.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    arguments = parser.parse_args(argv)
    report = check(arguments.seed, arguments.cases, progress=True)
    print(*report.failures, sep="\n", end="\n" if report.failures else "")
    print(report.summary())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
