"""How far verifiers can be trusted, where the truth is known. Pure functions of votes and truths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb


@dataclass(frozen=True)
class Votes:
    """On one candidate."""

    votes_for: int
    votes_against: int
    right: bool  # is the candidate?

    @property
    def share(self) -> float:
        return self.votes_for / self.count

    @property
    def count(self) -> int:
        return self.votes_for + self.votes_against


@dataclass(frozen=True)
class Confusion:
    """Positive: a vote for."""

    true_positive: float = 0
    false_positive: float = 0
    false_negative: float = 0
    true_negative: float = 0

    @property
    def true_positive_rate(self) -> float:
        """Of right candidates, those that are voted for; nan: there are none."""
        return _ratio(self.true_positive, self.true_positive + self.false_negative)

    @property
    def false_positive_rate(self) -> float:
        """Of wrong candidates, those that are voted for."""
        return _ratio(self.false_positive, self.false_positive + self.true_negative)

    @property
    def balanced_accuracy(self) -> float:
        """The mean over right and wrong candidates; 0.5 is what a coin has."""
        return (self.true_positive_rate + 1 - self.false_positive_rate) / 2


def confusion(votes: Sequence[Votes]) -> Confusion:
    """Of single verdicts."""
    right = [one for one in votes if one.right]
    wrong = [one for one in votes if not one.right]
    return Confusion(
        sum(one.votes_for for one in right),
        sum(one.votes_for for one in wrong),
        sum(one.votes_against for one in right),
        sum(one.votes_against for one in wrong),
    )


def roc(votes: Sequence[Votes]) -> list[tuple[float, float]]:
    """(false positive rate, true positive rate) as the share of votes that is asked for falls, from (0, 0) to (1, 1);
    empty where there are not both right and wrong candidates."""
    num_right = sum(one.right for one in votes)
    num_wrong = len(votes) - num_right
    if not num_right or not num_wrong:
        return []
    points = [(0.0, 0.0)]
    for threshold in sorted({one.share for one in votes}, reverse=True):
        taken = [one.right for one in votes if one.share >= threshold]
        points.append(((len(taken) - sum(taken)) / num_wrong, sum(taken) / num_right))
    return points


def area_under(points: Sequence[tuple[float, float]]) -> float:
    """Under the curve, by trapezoids: the chance that a right candidate has a larger share of the votes than a wrong
    one, ties counting half. 0.5 is what a coin has; nan without points."""
    if not points:
        return math.nan
    return math.fsum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))


def best_of(votes: Sequence[Votes], n: int) -> float:
    """The expected accuracy of one problem's best by share of votes among n of its N candidates, drawn without
    replacement; equal shares are drawn among. Exactly: of candidates in groups of equal share, a group of s with b
    below it holds the best of the draw with the chance (C(b + s, n) - C(b, n)) / C(N, n). nan: N < n."""
    if len(votes) < n:
        return math.nan
    expected, below = 0.0, 0
    for share in sorted({one.share for one in votes}):
        group = [one.right for one in votes if one.share == share]
        chance = (comb(below + len(group), n) - comb(below, n)) / comb(len(votes), n)
        expected += chance * sum(group) / len(group)
        below += len(group)
    return expected


def majority_of(votes: Sequence[Votes], k: int) -> Confusion:
    """What the majority of k votes says, drawn without replacement from each candidate's (hypergeometric), in expected
    counts; a tie is against. Candidates with fewer than k votes are left out."""
    counts = {True: [0.0, 0.0], False: [0.0, 0.0]}  # is it right -> [majority for, against]
    for one in votes:
        if one.count >= k:
            wins = range(k // 2 + 1, min(k, one.votes_for) + 1)
            ways = sum(comb(one.votes_for, i) * comb(one.votes_against, k - i) for i in wins)
            chance = ways / comb(one.count, k)
            counts[one.right][0] += chance
            counts[one.right][1] += 1 - chance
    return Confusion(counts[True][0], counts[False][0], counts[True][1], counts[False][1])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
