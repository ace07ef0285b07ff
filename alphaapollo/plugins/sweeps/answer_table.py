"""Answers of early and late iterations as a table, and the statistics that compare them.

A group, the answers to one prompt in one iteration, is the unit of every test, because its answers resemble each other.
Early and late groups are compared within each data source. z is an effect divided by its standard error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array, issparse

from alphaapollo.observability.sample_metrics import SampleResult
from alphaapollo.types import EpisodeEnd

MAX_SOURCES = 20  # data sources that are compared separately
EXAMPLES = 3


@dataclass(frozen=True)
class AuditedAnswer:
    """Graded answer of an iteration."""

    step: int
    prompt: str
    text: str
    result: SampleResult


AnswerGroup = Sequence[AuditedAnswer]


@dataclass(frozen=True)
class Comparison:
    """Means [S, F] of F values over the early and the late groups of S data sources, and the variances of their
    differences."""

    early: np.ndarray
    late: np.ndarray
    variance: np.ndarray
    share: np.ndarray  # [S] share of the late groups; 0 for a source without groups to compare

    def compute_rise(self, factor: np.ndarray | float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean rise over the data sources, times `factor` [S, F], and its standard error: [F]."""
        rise = self.share @ (factor * (self.late - self.early))
        return rise, np.sqrt(self.share**2 @ (factor**2 * self.variance))

    def compute_means(self) -> tuple[float, float]:
        """Return the early and the late mean of the first value over the data sources."""
        return float(self.share @ self.early[:, 0]), float(self.share @ self.late[:, 0])


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide arrays; 0 where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    return np.divide(numerator, denominator, out=np.zeros(numerator.shape), where=denominator > 0)


class AnswerTable:
    """Early and late groups: N answers, G groups, S data sources. Sources with fewer than two early or late groups are
    one source."""

    def __init__(self, early: Sequence[AnswerGroup], late: Sequence[AnswerGroup]):
        groups = [*early, *late]
        names = [group[0].result.data_source for group in groups]
        counts = Counter(names[: len(early)]), Counter(names[len(early) :])
        both = [name for name, _ in counts[1].most_common() if min(count[name] for count in counts) > 1]
        self.sources = ["other data sources", *both[:MAX_SOURCES]]
        source = [self.sources.index(name) if name in self.sources else 0 for name in names]
        self.answers = [answer for group in groups for answer in group]
        self.group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self.is_late = np.arange(len(groups)) >= len(early)
        self.reward = np.array([answer.result.reward for answer in self.answers])
        self.accuracy = np.array([answer.result.accuracy for answer in self.answers])
        self.is_cut = np.array([answer.result.end == EpisodeEnd.TOKEN_LIMIT for answer in self.answers], bool)
        self.source = np.array(source, np.int64)
        self._by_group = make_selection(self.group, len(groups))
        self._by_source = make_selection(self.source, len(self.sources))

    def sum_groups(self, values: np.ndarray | csr_array, factors: np.ndarray) -> np.ndarray:
        """Sum values [N, F] times factors [N] over the answers of each group: [G, F]."""
        total = self._by_group.multiply(factors) @ values
        return np.asarray(total.toarray() if issparse(total) else total)

    def sum_sources(self, values: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Sum values [G, F] times factors [G] over the groups of each data source: [S, F]."""
        return np.asarray(self._by_source.multiply(factors) @ values)

    def compare(self, values: np.ndarray | csr_array) -> Comparison:
        """Compare values [N, F] of the answers between late and early groups; NaN is left out of values [N].

        The variance of a mean is that between groups, and at least that of a share of as many answers, to which one
        answer with the mean of both sides is added: equal groups do not make an effect certain.
        """
        known = np.isfinite(values).astype(float) if values.ndim == 1 else np.ones(len(self.group))
        values = np.nan_to_num(values)[:, None] if values.ndim == 1 else values
        weights = self.sum_groups(known[:, None], known)[:, 0]
        means, ones = divide(self.sum_groups(values, known), weights[:, None]), np.ones((len(weights), 1))
        sides = [weights * side for side in (~self.is_late, self.is_late)]
        totals, sums = ([self.sum_sources(one, side) for side in sides] for one in (ones, means))
        counts = [self.sum_sources(ones, (side > 0).astype(float)) for side in sides]
        prior = divide(sums[0] + sums[1], totals[0] + totals[1])
        variance = np.zeros_like(prior)
        for side, total, count, value in zip(sides, totals, counts, sums, strict=True):
            spread = self.sum_sources((means - divide(value, total)[self.source]) ** 2, side**2)
            smooth = (value + prior) / (total + 1)
            floor = divide(smooth * (1 - smooth), total)
            variance += np.maximum(divide(spread * count, total**2 * (count - 1)), floor)
        share = totals[1][:, 0] * (np.minimum(*counts)[:, 0] > 1)
        return Comparison(
            divide(sums[0], totals[0]), divide(sums[1], totals[1]), variance, share / (share.sum() or 1.0)
        )

    def correlate(self, x: np.ndarray | csr_array, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Correlate x [N, F] with y [N] within groups. Returns correlations and z: [F]. NaN in y is left out."""
        known = np.isfinite(y).astype(float)
        count = self.sum_groups(known[:, None], known)
        means = divide(self.sum_groups(np.nan_to_num(y)[:, None], known), count)[:, 0]
        centered = np.where(known > 0, np.nan_to_num(y) - means[self.group], 0.0)
        parts = self.sum_groups(x, centered)
        squares = self.sum_groups(x**2, known) - divide(self.sum_groups(x, known) ** 2, count)
        scale = np.sqrt(np.maximum(squares.sum(axis=0), 0.0) * (centered**2).sum())
        return divide(parts.sum(axis=0), scale), divide(parts.sum(axis=0), np.sqrt((parts**2).sum(axis=0)))

    def pick(self, wanted: np.ndarray, keys: np.ndarray) -> tuple[AuditedAnswer, ...]:
        """Return a few of the wanted answers [N], to different prompts: late ones first, then those with high keys."""
        is_late, picked = self.is_late[self.group], dict[tuple[str, int], AuditedAnswer]()
        for at in sorted(np.flatnonzero(wanted), key=lambda at: (not is_late[at], -keys[at])):
            answer = self.answers[at]
            picked.setdefault((answer.result.data_source, answer.result.problem_id), answer)
        return tuple(picked.values())[:EXAMPLES]


def make_selection(row: np.ndarray, num_rows: int) -> csr_array:
    """Return the matrix [R, N] with a 1 for the row of each of N items."""
    return csr_array((np.ones(len(row)), (row, np.arange(len(row)))), shape=(num_rows, len(row)))
