"""How right an evolution is: accuracy round by round with intervals over problems, beside what other ways of using the
same solutions would give; and where policy and verifiers agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from alphaapollo.algorithms.accuracy_estimates import bootstrap_interval, majority_accuracy
from alphaapollo.evaluation.figures import Figure
from alphaapollo.evolving.memory import judged_candidates
from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Candidate
from alphaapollo.evolving.selection import ranked


@dataclass(frozen=True)
class Table:
    """Policy and verifiers, by candidates with a truth; `unjudged`: nobody voted on them."""

    right_for: int = 0
    right_against: int = 0
    wrong_for: int = 0
    wrong_against: int = 0
    unjudged: int = 0


@dataclass(frozen=True)
class RoundFigures:
    """After one round. Each figure is a mean over problems with its 95 % interval; None: no problem has it."""

    round: int
    chosen: Figure | None  # by votes and brevity, from this round and those before
    sampled: Figure | None  # of this round's solutions, the mean
    majority: Figure | None  # the most frequent answer of all so far, without verifiers (self-consistency)
    oracle: Figure | None  # is any of those so far right?
    table: Table  # of this round


def round_figures(pool: Pool, problems: Sequence[int], number: int) -> RoundFigures:
    """Of problems whose solutions have a truth."""

    def over(value: Callable[[int], float]) -> Figure | None:
        return mean_figure([value(problem) for problem in problems])

    def so_far(problem: int) -> list[Candidate]:
        return [one for one in pool.of_problem(problem, number + 1) if one.right is not None]

    def of_round(problem: int) -> list[Candidate]:
        return [one for one in so_far(problem) if one.place.round == number]

    def chosen(problem: int) -> float:
        best = next(iter(ranked(judged_candidates(pool, problem, number + 1))), None)
        return math.nan if best is None or best.right is None else float(best.right)

    return RoundFigures(
        number,
        chosen=over(chosen),
        sampled=over(lambda problem: share_right(of_round(problem))),
        majority=over(lambda problem: majority(so_far(problem))),
        oracle=over(lambda problem: max((float(bool(one.right)) for one in so_far(problem)), default=math.nan)),
        table=agreement(pool, [one for problem in problems for one in of_round(problem)]),
    )


def agreement(pool: Pool, candidates: Iterable[Candidate]) -> Table:
    """Whether the verifiers' majority says of each what is so."""
    counts = dict.fromkeys(Table.__dataclass_fields__, 0)
    for candidate in candidates:
        judgement = pool.judgements.get(candidate.key)
        if judgement is None or judgement.right is None:
            counts["unjudged"] += 1
        else:
            counts[f"{'right' if candidate.right else 'wrong'}_{'for' if judgement.right else 'against'}"] += 1
    return Table(**counts)


def share_right(candidates: Sequence[Candidate]) -> float:
    """nan: there are none."""
    return sum(bool(one.right) for one in candidates) / len(candidates) if candidates else math.nan


def majority(candidates: Sequence[Candidate]) -> float:
    """The accuracy of their most frequent answer."""
    if not candidates:
        return math.nan
    return majority_accuracy([one.answer for one in candidates], [float(bool(one.right)) for one in candidates])


def mean_figure(values: Sequence[float]) -> Figure | None:
    """Over the problems that have one (not nan)."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    low, high = (
        None if math.isnan(bound) else float(bound) for bound in bootstrap_interval(np.array(known)[:, None])[:, 0]
    )
    return Figure(math.fsum(known) / len(known), low, high, problems=len(known))
