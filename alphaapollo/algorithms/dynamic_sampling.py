"""DAPO's dynamic sampling: which groups teach anything."""

from __future__ import annotations

import math
from collections.abc import Sequence


def keep_group(metric_values: Sequence[float], tolerance: float = 0.0) -> bool:
    """True if the samples of a group differ in the metric (arXiv 2503.14476, Eq. 11: 0 < number correct < G).

    Look at the accuracy, not at the shaped reward: a length penalty makes every group look alive. Compared as
    max - min, because a standard deviation of equal floats need not be 0. A group of one or none is dropped.
    """
    if any(math.isnan(value) for value in metric_values):
        raise ValueError(f"NaN among the metric values of a group: {list(metric_values)}; drop failed samples first.")
    return len(metric_values) > 1 and max(metric_values) - min(metric_values) > tolerance
