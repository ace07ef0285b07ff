"""Statistics of an evaluation: pass@k and majority vote per problem, and confidence intervals over problems; answers in
a normalized form, so that equal answers are equal strings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from alphaapollo.rewards.answers import find_marked_answer

RESAMPLES = 5000  # number of bootstrap resamples; the quantile levels are then accurate to about 0.002
CHUNK = 2**22  # number of problems drawn per numpy call; bounds memory


def pass_at_k(num_samples: np.ndarray, num_correct: np.ndarray, largest_k: int) -> np.ndarray:
    """Estimate pass@k of each problem without bias: the probability that at least one of k samples is correct.

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - product over j < k of (n - c - j) / (n - j)      (arXiv 2107.03374, Eq. 1)

    num_samples, num_correct: [P] n and c. Returns [P, K] for K = largest_k; column k - 1 is pass@k, NaN where n < k.
    """
    n, c, j = num_samples[:, None], num_correct[:, None], np.arange(largest_k)[None, :]
    wrong = np.maximum(n - c - j, 0) / np.maximum(n - j, 1)
    return np.where(j < n, 1 - np.cumprod(wrong, axis=1), np.nan)


def majority_accuracy(answers: Sequence[str | None], accuracies: Sequence[float]) -> float:
    """Compute the accuracy of the most frequent answer of one problem (majority vote), in [0, 1].

    A tie gives the mean over the tied answers, which is the expected accuracy of a random choice. A sample without an
    answer (None) does not vote; without votes the result is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = {answer for answer, count in votes.items() if count == most}
    counted = [value for answer, value in zip(answers, accuracies, strict=True) if answer in leaders]
    return math.fsum(counted) / len(counted)  # leaders have equally many samples, so this is the mean of their means


def compute_bootstrap_interval(
    values: np.ndarray, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> np.ndarray:
    """Compute percentile bootstrap intervals of the mean of F metrics over P problems.

    Only problems are resampled, not their samples; all metrics use the same resamples. The values of each metric are
    sorted first, so that the order of the problems does not matter.

    values: [P, F]; NaN is ignored. Returns [2, F] lower and upper bound; NaN for metrics with fewer than two problems.
    """
    num_problems, num_metrics = values.shape
    values = np.sort(values, axis=0)
    has_value = ~np.isnan(values)
    if num_problems == 0 or num_metrics == 0:
        return np.full((2, num_metrics), np.nan)
    filled, generator = np.where(has_value, values, 0.0), np.random.default_rng(seed)
    means = np.empty((resamples, num_metrics))
    size = max(1, CHUNK // num_problems)
    for start in range(0, resamples, size):
        rows = min(size, resamples - start)
        draws = generator.integers(num_problems, size=(rows, num_problems)) + num_problems * np.arange(rows)[:, None]
        counts = np.bincount(draws.ravel(), minlength=rows * num_problems).reshape(rows, num_problems).astype(float)
        with np.errstate(invalid="ignore"):  # a resample may have no value of a metric
            means[start : start + rows] = (counts @ filled) / (counts @ has_value)
    enough = has_value.sum(axis=0) >= 2
    bounds = np.full((2, num_metrics), np.nan)
    tail = (1 - level) / 2
    bounds[:, enough] = np.nanquantile(means[:, enough], [tail, 1 - tail], axis=0)
    return bounds


TAIL = 10_000  # only so many characters at the end of a text are searched
NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
WHOLE_NUMBER = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d{1,200})?(\.\d{1,200})?(?:/(\d{1,200}))?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
NOISE = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\s|\.$")


def extract_answer(text: str) -> str | None:
    r"""Extract the normalized final answer of a response: `\boxed{1{,}200.0}` and `#### $1200` both give "1200".

    Returns the answer marked with `<answer>`, `\boxed` or `####`, else the last number, else the whole text; None for
    an empty text. White space, LaTeX spacing and case are removed, and numbers are written in one form. Other
    equivalent expressions, e.g. `\frac12` and `(1/2)`, remain different.
    """
    text = text[-TAIL:]
    marked = find_marked_answer(text)
    if marked is None:
        numbers = NUMBER.findall(text)
        marked = numbers[-1] if numbers else text
    bare = NOISE.sub("", marked.replace("{,}", ","))
    return _normalize_number(LATEX_FRACTION.sub(r"\1/\2", bare)) or bare.casefold() or None


def _normalize_number(text: str) -> str | None:
    """Return a number as a reduced fraction, e.g. "1,200.50" as "2401/2"; None if the text is not a number."""
    match = WHOLE_NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals, divisor = match.groups()
    if not (whole or decimals) or (divisor and int(divisor) == 0):
        return None
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(divisor or 1)
    return str(-value if sign else value)
