"""DAPO's dynamic sampling: which groups have a learning signal."""

from __future__ import annotations

import math
from collections.abc import Sequence


def keep_group(metric_values: Sequence[float], tolerance: float = 0.0) -> bool:
    """True if the samples of a group differ in the metric (arXiv 2503.14476, Eq. 11: 0 < number correct < G).

    Use the accuracy, not the shaped reward: with a length penalty, samples of every group differ. The test is
    max - min, because the standard deviation of equal floats may not be 0. Groups with fewer than two samples are
    dropped.
    """
    if any(math.isnan(value) for value in metric_values):
        raise ValueError(f"NaN among the metric values of a group: {list(metric_values)}. Drop failed samples first.")
    return len(metric_values) > 1 and max(metric_values) - min(metric_values) > tolerance
