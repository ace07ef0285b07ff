"""Train again on recent rollout groups (data.reuse): a bounded replay buffer, as a function of saved state.

A group stays complete: its advantages are computed from its own samples, and its tokens keep the log-probs of the
engine that sampled them. algorithm.rollout_correction weights them by the current policy, like those of late groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alphaapollo.config.schema import Data
from alphaapollo.trainer.progress import Progress, RecentGroups
from alphaapollo.trainer.step.collect import has_metric_variance
from alphaapollo.types import TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed


def take_recent_groups(
    progress: Progress, step: int, fresh: Sequence[TrajectoryGroup], data: Data
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Choose the groups of earlier iterations that iteration `step` trains on again, and add `fresh` for later ones.

    Only groups with different rewards are kept, because the others have no advantages. Returns groups and metrics.
    """
    if not data.reuse.groups:
        progress.recent = RecentGroups()
        return [], {}
    kept = [(origin, group) for origin, group in progress.recent.entries if step - origin <= data.reuse.max_age]
    rng = np.random.default_rng(derive_seed(data.seed, "reuse", step))
    chosen = [kept[index] for index in sorted(rng.permutation(len(kept))[: data.reuse.groups])]
    added = [(step, group) for group in fresh if has_metric_variance(group, "reward")]
    progress.recent = RecentGroups((*kept, *added))
    ages = [step - origin for origin, _ in chosen]
    metrics = {"reuse/groups": float(len(chosen)), "reuse/age": float(np.mean(ages)) if ages else 0.0}
    return [group for _, group in chosen], metrics
