"""What weights are worth: the mean reward of what they have played in training. The rotation of checkpoints looks at
it, so that a run whose reward collapses does not lose every checkpoint from before."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from alphaapollo.types import TrajectoryGroup

FEWEST = 4  # prompts, or the mean says nothing
LOST = 0.2  # of the best mean
NOISE = 3.0  # standard errors


@dataclass(frozen=True)
class Worth:
    """A mean over prompts."""

    mean: float
    error: float  # standard error


def worth_of(groups: Iterable[TrajectoryGroup]) -> dict[int, Worth]:
    """By version of the weights: of the trajectories that it ended, those that have a reward."""
    means: dict[int, list[float]] = defaultdict(list)
    for group in groups:
        rewards: dict[int, list[float]] = defaultdict(list)
        for one in group.trajectories:
            if one.turns and not one.score.outcome.failed:
                rewards[one.turns[-1].completion.weight_version].append(one.reward)
        for version, own in rewards.items():
            means[version].append(fmean(own))
    return {
        version: Worth(fmean(own), stdev(own) / math.sqrt(len(own)))
        for version, own in means.items()
        if len(own) >= FEWEST
    }


def far_better(worth: Mapping[int, Worth], steps: Iterable[int]) -> int | None:
    """Of the checkpoints of these iterations the best, where the newest weights that have played are far below it: by a
    fifth, and by more than chance."""
    known = [step for step in steps if step in worth]
    if not known:
        return None
    best = max(known, key=lambda step: worth[step].mean)
    top, now = worth[best], worth[max(worth)]
    noise = NOISE * math.hypot(top.error, now.error)
    return best if top.mean - now.mean > max(LOST * abs(top.mean), noise) else None
