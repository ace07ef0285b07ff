"""Accuracy by round with intervals over problems, and how well the verifiers' votes predict the ground truth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np

from alphaapollo.algorithms.accuracy_estimates import bootstrap_interval, majority_accuracy
from alphaapollo.evaluation.metrics import Estimate
from alphaapollo.evolving.pool import Candidate, Judgement, Pool
from alphaapollo.evolving.selection import rank_candidates

ACCURACIES = ("chosen", "sampled", "majority", "oracle")
GradedJudgement = tuple[Judgement, bool]
"""Votes on a candidate, at least one, and whether it is right."""


def summarize_round(pool: Pool, problems: Sequence[int], number: int) -> dict[str, Any]:
    """Accuracies of a round, each a mean over problems with its 95 % interval or None, and the table of its verdicts.

    chosen: the best candidate by votes and brevity, of this round and earlier ones. sampled: all of this round's
    candidates. majority: the most frequent answer so far, without verifiers (self-consistency). oracle: at least one
    candidate so far is right. Candidates without a ground truth are left out.
    """
    known = [
        [one for one in pool.candidates_of_problem(problem, number + 1) if one.right is not None]
        for problem in problems
    ]
    so_far = [own for own in known if own]
    of_round = [made for own in so_far if (made := [one for one in own if one.place.round == number])]
    majorities = [
        majority_accuracy([one.answer for one in own], [float(bool(one.right)) for one in own]) for own in so_far
    ]
    best = [next(iter(rank_candidates(pool, problem, number + 1)), None) for problem in problems]
    return {
        "round": number,
        "chosen": estimate_mean([accuracy_of(candidate) for candidate in best]),
        "sampled": estimate_mean([sum(bool(one.right) for one in own) / len(own) for own in of_round]),
        "majority": estimate_mean(majorities),
        "oracle": estimate_mean([float(any(one.right for one in own)) for own in so_far]),
        "table": tabulate_verdicts(pool, [one for own in of_round for one in own]),
    }


def compute_round_metrics(pool: Pool, problems: Sequence[int], number: int) -> dict[str, float]:
    """The line of metrics.jsonl of a round (docs/metrics.md). NaN: no problem has the value."""
    summary, metrics = summarize_round(pool, problems, number), dict[str, float]()
    for name in ACCURACIES:
        for suffix, field in (("", "value"), ("/low", "low"), ("/high", "high")):
            value = getattr(summary[name], field, None)
            metrics[f"accuracy/{name}{suffix}"] = math.nan if value is None else value
    metrics |= {f"table/{name}": float(count) for name, count in summary["table"].items()}
    candidates, usage = pool.candidates_of_round(number), pool.round_usage(number)
    metrics["candidates/made"] = float(len(candidates))
    metrics["candidates/failed"] = float(sum(bool(one.failure) for one in candidates))
    return metrics | {f"cost/{name}": float(value) for name, value in asdict(usage).items()}


def tabulate_verdicts(pool: Pool, candidates: Iterable[Candidate]) -> dict[str, int]:
    """Counts of right and wrong candidates by the verifiers' majority. `unjudged`: candidates without votes."""
    counts = dict.fromkeys(("right_for", "right_against", "wrong_for", "wrong_against", "unjudged"), 0)
    for candidate in candidates:
        judgement = pool.judgements.get(candidate.key)
        if judgement is None or judgement.right is None:
            counts["unjudged"] += 1
        else:
            counts[f"{'right' if candidate.right else 'wrong'}_{'for' if judgement.right else 'against'}"] += 1
    return counts


def accuracy_of(candidate: Candidate | None) -> float:
    """1 or 0; NaN if there is no candidate or no ground truth."""
    return math.nan if candidate is None or candidate.right is None else float(candidate.right)


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """Mean over the values that are not NaN, with its 95 % bootstrap interval; None without values."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    low, high = (
        None if math.isnan(bound) else float(bound) for bound in bootstrap_interval(np.array(known)[:, None])[:, 0]
    )
    return Estimate(math.fsum(known) / len(known), low, high, problems=len(known))


@dataclass(frozen=True)
class ConfusionMatrix:
    """Votes against the truth; positive is a vote for."""

    true_positive: float = 0
    false_positive: float = 0
    false_negative: float = 0
    true_negative: float = 0

    @property
    def true_positive_rate(self) -> float:
        """Share of right candidates with a vote for; NaN without right candidates."""
        right = self.true_positive + self.false_negative
        return self.true_positive / right if right else math.nan

    @property
    def false_positive_rate(self) -> float:
        """Share of wrong candidates with a vote for; NaN without wrong candidates."""
        wrong = self.false_positive + self.true_negative
        return self.false_positive / wrong if wrong else math.nan

    @property
    def balanced_accuracy(self) -> float:
        """Mean accuracy over right and wrong candidates; 0.5 for random votes."""
        return (self.true_positive_rate + 1 - self.false_positive_rate) / 2


def confusion_of_votes(votes: Sequence[GradedJudgement]) -> ConfusionMatrix:
    """Confusion matrix of single votes."""
    counts = {True: [0, 0], False: [0, 0]}  # right -> [votes for, votes against]
    for judgement, right in votes:
        counts[right][0] += judgement.votes_for
        counts[right][1] += judgement.votes_against
    return ConfusionMatrix(counts[True][0], counts[False][0], counts[True][1], counts[False][1])


def roc_curve(votes: Sequence[GradedJudgement]) -> list[tuple[float, float]]:
    """(false positive rate, true positive rate) for falling thresholds on the share of votes, from (0, 0) to (1, 1).

    Empty unless there are both right and wrong candidates.
    """
    num_right = sum(right for _, right in votes)
    num_wrong = len(votes) - num_right
    if not num_right or not num_wrong:
        return []
    points = [(0.0, 0.0)]
    for threshold in sorted({judgement.share for judgement, _ in votes}, reverse=True):
        taken = [right for judgement, right in votes if judgement.share >= threshold]
        points.append(((len(taken) - sum(taken)) / num_wrong, sum(taken) / num_right))
    return points


def area_under_curve(points: Sequence[tuple[float, float]]) -> float:
    """Trapezoidal area: the probability that a right candidate has a larger share of votes than a wrong one, where
    ties count half. 0.5 for random votes; NaN without points."""
    if not points:
        return math.nan
    return math.fsum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))


def best_of_n(votes: Sequence[GradedJudgement], n: int) -> float:
    """Expected accuracy of the candidate with the most votes among n of one problem's N, drawn without replacement.

    Exact: with s candidates of one share of votes and b below it, one of the s wins with probability
    (C(b + s, n) - C(b, n)) / C(N, n); ties are broken at random. NaN if N < n.
    """
    if len(votes) < n:
        return math.nan
    expected, below = 0.0, 0
    for share in sorted({judgement.share for judgement, _ in votes}):
        group = [right for judgement, right in votes if judgement.share == share]
        chance = (comb(below + len(group), n) - comb(below, n)) / comb(len(votes), n)
        expected += chance * sum(group) / len(group)
        below += len(group)
    return expected


def majority_of_k(votes: Sequence[GradedJudgement], k: int) -> ConfusionMatrix:
    """Expected confusion matrix of the majority of k votes, drawn without replacement (hypergeometric).

    A tie counts as against. Candidates with fewer than k votes are left out.
    """
    counts = {True: [0.0, 0.0], False: [0.0, 0.0]}  # right -> [majority for, majority against]
    for judgement, right in votes:
        if judgement.votes >= k:
            wins = range(k // 2 + 1, min(k, judgement.votes_for) + 1)
            ways = sum(comb(judgement.votes_for, i) * comb(judgement.votes_against, k - i) for i in wins)
            chance = ways / comb(judgement.votes, k)
            counts[right][0] += chance
            counts[right][1] += 1 - chance
    return ConfusionMatrix(counts[True][0], counts[False][0], counts[True][1], counts[False][1])
